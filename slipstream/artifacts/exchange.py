"""Exchange of values and files between pods that prepare one table.

The value is a dataclass, encoded by :mod:`slipstream.artifacts.typed_values`. Its reader names the class, so a writer
to the store between the pods cannot run code in them.
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
#: Subdirectory of an artifact with much data: a small artifact that describes it and can be fetched alone.
SUMMARY = "summary"

T = TypeVar("T")


def write(directory: Path, value: object = None, files: Iterable[Path] = ()) -> Path:
    """Write an artifact of ``value`` and ``files`` to the fresh ``directory`` and return the directory.

    ``value`` is a dataclass or None. ``files`` keep their last names. Files that are already in the directory belong to
    the artifact.
    """
    writer = ArtifactWriter(directory)
    for file in files:
        link_or_copy(file.parent, file.name, directory / file.name)
    if value is not None:
        writer.write_bytes(VALUE, encode(value, type(value)))
    return writer.finish(KIND, {}).directory


def verify(directory: Path) -> Artifact:
    """Raise ``DamagedArtifact`` if a file is not as it was written."""
    return Artifact.open(directory, KIND).check()


def read(directory: Path, kind: type[T]) -> T:
    """Return the value.

    Raises ``DamagedArtifact`` if it is missing or not a ``kind``, or if a file is not as it was written.
    """
    artifact = verify(directory)
    path = artifact.path(VALUE)
    if VALUE not in artifact.files:
        raise DamagedArtifact(f"{path}: missing; expected a {kind.__name__}")
    with artifact.open_file(VALUE) as file:
        data = file.read(artifact.files[VALUE].size)
    if hashlib.sha256(data).hexdigest() != artifact.files[VALUE].sha256:
        raise DamagedArtifact(f"{path}: its SHA-256 differs from the manifest's")
    value: T = decode(data, kind, path)
    return value


def path_in(directory: Path, name: str | Path) -> Path:
    """Return the path of a file that a value names.

    Raises ``DamagedArtifact`` unless it lies in ``directory`` itself.
    """
    if fault(str(name)) or "/" in str(name):
        raise DamagedArtifact(f"{directory / VALUE}: names the file {str(name)!r}; expected a name without a directory")
    return directory / name


@contextmanager
def scratch_for(output: Path, workers: int) -> Iterator[ResumableScratch]:
    """Yield a scratch directory on the disk of ``output`` and remove it afterwards."""
    with (
        closing(Workers(workers)) as processes,
        resumable_scratch(output.with_name(f"{output.name}.work"), processes, lasting=False) as scratch,
    ):
        yield scratch
