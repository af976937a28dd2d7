"""Exchange of values and files between the pods that prepare one table.

A value is a dataclass, serialized by :mod:`slipstream.shared.artifacts.typed_values` rather than pickle: the reading
pod names the class, so a writer to the store cannot run code there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact
from slipstream.shared.artifacts.resume import ResumableScratch, resumable_scratch
from slipstream.shared.artifacts.typed_values import decode_value, encode_value
from slipstream.shared.distributed.pool import WorkerPool
from slipstream.shared.storage.names import name_fault
from slipstream.shared.untrusted_files import link_or_copy

KIND = "prepare.part"
VALUE = "value.safetensors"
#: Subdirectory with a second, small artifact that describes the large one; it can be downloaded alone.
SUMMARY = "summary"

T = TypeVar("T")


def write_part(directory: Path, value: object = None, files: Iterable[Path] = ()) -> Path:
    """Write an artifact of ``value`` and ``files`` into ``directory`` and return the directory.

    ``value`` is a dataclass or None. ``files`` keep their base names. Files already in ``directory`` join the artifact.
    """
    writer = ArtifactWriter(directory)
    for file in files:
        link_or_copy(file.parent, file.name, directory / file.name)
    if value is not None:
        writer.write_bytes(VALUE, encode_value(value, type(value)))
    return writer.finish(KIND, {}).directory


def verify_part(directory: Path) -> Artifact:
    """Open the artifact in ``directory``. Raises ``DamagedArtifact`` if a file differs from its digest."""
    return Artifact.open(directory, KIND).check()


def read_part(directory: Path, kind: type[T]) -> T:
    """Return the value of the artifact in ``directory``, an instance of ``kind``.

    Raises ``DamagedArtifact`` if the value is missing or of another class, or if a file differs from its digest.
    """
    artifact = verify_part(directory)
    path = artifact.path(VALUE)
    if VALUE not in artifact.files:
        raise DamagedArtifact(f"{path}: missing; expected a {kind.__name__}")
    with artifact.open_file(VALUE) as file:
        data = file.read(artifact.files[VALUE].size)
    if hashlib.sha256(data).hexdigest() != artifact.files[VALUE].sha256:
        raise DamagedArtifact(f"{path}: its SHA-256 differs from the manifest's")
    value: T = decode_value(data, kind, path)
    return value


def path_in(directory: Path, name: str | Path) -> Path:
    """Return the path of the file ``name`` in ``directory``; ``name`` comes from a decoded, untrusted value.

    Raises ``DamagedArtifact`` if ``name`` contains a directory.
    """
    if name_fault(str(name)) or "/" in str(name):
        raise DamagedArtifact(f"{directory / VALUE}: names the file {str(name)!r}; expected a name without a directory")
    return directory / name


@contextmanager
def scratch_for(output: Path, workers: int) -> Iterator[ResumableScratch]:
    """Yield a scratch directory next to ``output`` for ``workers`` processes; remove it afterwards."""
    with (
        closing(WorkerPool(workers)) as processes,
        resumable_scratch(output.with_name(f"{output.name}.work"), processes, lasting=False) as scratch,
    ):
        yield scratch
