"""Bring the parts of a checkpoint's tensor files to this machine that its ranks read, and verify them.

A file is read in the blocks that its manifest has a digest of, so a part of it can be verified alone. The ranks of a
machine share a directory: what several of them read is brought by one, and each brings an equal part of it all. In a
local store the files stay where they are and are only verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from slipstream.artifacts.format import Artifact, DamagedArtifact, FileRecord
from slipstream.storage import STORES, read_range, stat_object
from slipstream.train.checkpoint.shards import Piece

#: The most bytes of one request, and how many requests a rank makes at a time: what it holds of the files at once.
RUN_BYTES = 8 << 20
REQUESTS = 8

#: Return the bytes from ``start`` to ``end``.
Read = Callable[[int, int], bytes]


class Run(NamedTuple):
    """Blocks of a file that follow each other: from ``first`` up to, without, ``end``."""

    file: str
    first: int
    end: int


def blocks_of(pieces: Iterable[Piece], files: Mapping[str, FileRecord]) -> list[Run]:
    """The blocks that hold the bytes of the pieces, each once, sorted."""
    blocks: set[tuple[str, int]] = set()
    for file, start, size in pieces:
        if size:
            step = files[file].block_bytes
            blocks |= {(file, block) for block in range(start // step, (start + size - 1) // step + 1)}
    return runs(sorted(blocks))


def runs(blocks: Iterable[tuple[str, int]]) -> list[Run]:
    """Sorted blocks as runs."""
    found: list[Run] = []
    for file, block in blocks:
        if found and found[-1].file == file and found[-1].end == block:
            found[-1] = found[-1]._replace(end=block + 1)
        else:
            found.append(Run(file, block, block + 1))
    return found


def share(needed: Iterable[list[Run]], index: int, count: int) -> list[Run]:
    """What the rank ``index`` of the ``count`` ranks of a machine brings of what each of them needs."""
    blocks = sorted({(file, block) for of_rank in needed for file, *span in of_rank for block in range(*span)})
    return runs(blocks[index * len(blocks) // count : (index + 1) * len(blocks) // count])


def requests(mine: Iterable[Run], files: Mapping[str, FileRecord]) -> Iterator[Run]:
    """The runs in parts of at most :data:`RUN_BYTES`."""
    for run in mine:
        step = max(1, RUN_BYTES // files[run.file].block_bytes)
        for first in range(run.first, run.end, step):
            yield run._replace(first=first, end=min(first + step, run.end))


def bring(uri: str, artifact: Artifact, mine: Iterable[Run]) -> None:
    """Verify the blocks; from a store that is reached by requests, write them into the artifact's files, too.

    Raises ``DamagedArtifact``, ``MissingObject``, ``StorageUnavailable``.
    """
    work = list(requests(mine, artifact.files))
    bringing = bring_stored if uri.startswith(STORES) else check_local
    readers = {file: bringing(f"{uri}/{file}", artifact, file) for file in sorted({run.file for run in work})}
    with ThreadPoolExecutor(REQUESTS) as pool:
        for _ in pool.map(lambda run: readers[run.file](run), work):
            pass


def check_local(uri: str, artifact: Artifact, file: str) -> Callable[[Run], None]:
    """A function that verifies blocks of a file in place."""

    def check(run: Run) -> None:
        with artifact.path(file).open("rb") as source:
            checked(artifact, run, lambda start, end: (source.seek(start), source.read(end - start))[1])

    return check


def bring_stored(uri: str, artifact: Artifact, file: str) -> Callable[[Run], None]:
    """A function that copies blocks of the object into the artifact's file."""
    source, record = stat_object(uri), artifact.files[file]
    if source.size != record.size:
        raise DamagedArtifact(f"{uri}: {source.size} bytes, the manifest says {record.size}")

    def read(start: int, end: int) -> bytes:
        return read_range(source, start, end)

    def copy(run: Run) -> None:
        try:
            data = checked(artifact, run, read)
        except DamagedArtifact:
            # The checksum of an object says nothing about a part of it: the bytes may have changed on their way.
            data = checked(artifact, run, read)
        with artifact.path(file).open("r+b") as target:
            target.seek(run.first * record.block_bytes)
            target.write(data)

    return copy


def checked(artifact: Artifact, run: Run, read: Read) -> bytes:
    """The bytes of the blocks. Raises ``DamagedArtifact`` unless they are the manifest's."""
    record = artifact.files[run.file]
    step = record.block_bytes
    data = read(run.first * step, min(run.end * step, record.size))
    view = memoryview(data)
    for block in range(run.first, run.end):
        start = (block - run.first) * step
        artifact.check_block(run.file, block, view[start : start + step])
    return data


def make_room(path: Path, size: int) -> None:
    """A file of ``size`` bytes that takes up no space until they are written."""
    with path.open("xb") as file:
        file.truncate(size)
