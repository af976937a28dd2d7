"""What one pod passes to the next while several prepare a table: an artifact of a value and the files it names.

The value is a dataclass, written as :mod:`slipstream.artifacts.typed_values` writes it. Its reader names the class, so
that who can write to the store between the pods cannot run code in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from slipstream.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact
from slipstream.artifacts.resume import ResumableScratch, resumable_scratch
from slipstream.artifacts.typed_values import decode, encode
from slipstream.distributed.pool import Workers
from slipstream.storage.names import fault
from slipstream.untrusted_files import link_or_copy

KIND = "prepare.part"
VALUE = "value.safetensors"
#: In an artifact with much data, the directory of an artifact that describes it: that one can be fetched alone.
SUMMARY = "summary"

T = TypeVar("T")


def write(directory: Path, value: object = None, files: Iterable[Path] = ()) -> Path:
    """Write the dataclass ``value``, if there is one, and ``files``, under their last names, to the fresh
    ``directory``; returns it. What lies in the directory already belongs to the artifact."""
    writer = ArtifactWriter(directory)
    for file in files:
        link_or_copy(file.parent, file.name, directory / file.name)
    if value is not None:
        writer.write_bytes(VALUE, encode(value, type(value)))
    return writer.finish(KIND, {}).directory


def verify(directory: Path) -> Artifact:
    """Raises ``DamagedArtifact`` unless all files are what was written."""
    return Artifact.open(directory, KIND).check()


def read(directory: Path, kind: type[T]) -> T:
    """The value. Raises ``DamagedArtifact`` if there is none or it is no ``kind``, or a file is not what was
    written."""
    artifact = verify(directory)
    path = artifact.path(VALUE)
    if VALUE not in artifact.files:
        raise DamagedArtifact(f"{path}: missing; expected a {kind.__name__}")
    with artifact.open_file(VALUE) as file:
        data = file.read(artifact.files[VALUE].size)
    if hashlib.sha256(data).hexdigest() != artifact.files[VALUE].sha256:
        raise DamagedArtifact(f"{path}: its SHA-256 is not the manifest's")
    value: T = decode(data, kind, path)
    return value


def path_in(directory: Path, name: str | Path) -> Path:
    """The file that a value names. Raises ``DamagedArtifact`` unless it lies in ``directory`` itself."""
    if fault(str(name)) or "/" in str(name):
        raise DamagedArtifact(f"{directory / VALUE}: names the file {str(name)!r}; expected a name without a directory")
    return directory / name


@contextmanager
def scratch_for(output: Path, workers: int) -> Iterator[ResumableScratch]:
    """A scratch directory for as long as the context lasts, on the disk of ``output``."""
    with (
        closing(Workers(workers)) as processes,
        resumable_scratch(output.with_name(f"{output.name}.work"), processes, lasting=False) as scratch,
    ):
        yield scratch
