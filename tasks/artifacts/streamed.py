"""Prepared data that stays on S3: its blocks stream to local disk ahead of use, into a cache of bounded size.

A *stub* is a directory that looks like the artifact, but whose segments are holes: everything else is there, and
``remote.json`` says where the rows are and how much disk they may take. Each process that opens it keeps blocks of its
own in sparse files without a name, which end with it however it ends. A block is checked against the manifest before
it is written there; what was never fetched reads as zeros and fails every reader's own check.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from tasks.artifacts.format import MANIFEST, Artifact, DamagedArtifact, canonical_json
from tasks.artifacts.prepared import Block, PreparedData
from tasks.errors import UserError
from tasks.storage import list_objects, storage_for

STUB = "remote.json"
ROWS = ".rows"
#: Ranged requests under way at once, per process.
REQUESTS = 16
#: Batches whose blocks are fetched before the first of them is used.
AHEAD = 64

Item = TypeVar("Item")


def size_of(uri: str) -> int:
    """The bytes of an artifact, by its manifest. Raises ``UserError`` if there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        manifest = storage_for(uri).get(MANIFEST, Path(scratch)).read_bytes()
    return sum(record["size"] for record in json.loads(manifest)["files"].values())


def make_stub(uri: str, directory: Path, cache_bytes: int | None = None) -> Path:
    """Make a stub of the prepared data at the ``s3://`` URI in the fresh ``directory``; each process that opens it may
    keep ``cache_bytes`` of rows, or all that it reads. Raises ``UserError`` if there is nothing, ``StorageUnavailable``
    if the store is away."""
    storage = storage_for(uri)
    directory.mkdir(parents=True)
    files = json.loads(storage.get(MANIFEST, directory).read_bytes())["files"]
    for name, record in files.items():
        if name.endswith(ROWS):
            (directory / name).touch()
            os.truncate(directory / name, record["size"])
        else:
            storage.get(name, directory)
    room = sum(record["size"] for record in files.values()) if cache_bytes is None else cache_bytes
    (directory / STUB).write_bytes(canonical_json({"uri": uri, "cache_bytes": room}))
    return directory


@dataclass(frozen=True)
class StreamedData(PreparedData):
    """Prepared data whose rows come through ``stream``, ahead of their use or when they are read."""

    stream: Stream

    def verified(self, blocks: list[Block]) -> Iterator[np.ndarray]:
        self.stream.bring(blocks)
        yield from super().verified(blocks)

    def mapped(self, segment: str) -> np.ndarray:
        return self.stream.mapped(segment).reshape(-1, self.signature.record.itemsize)


def open_prepared(directory: Path) -> PreparedData:
    """Prepared data in ``directory``, whole or a stub. Raises ``DamagedArtifact``."""
    data = PreparedData.open(directory)
    return StreamedData(data.artifact, data.signature, Stream(data.artifact)) if (directory / STUB).exists() else data


class Stream:
    """This process's blocks of the prepared data behind a stub. Used by several iterators at once."""

    def __init__(self, artifact: Artifact) -> None:
        said = json.loads((artifact.directory / STUB).read_bytes())
        self._artifact = artifact
        base = said["uri"].rstrip("/")
        self._objects = {info.uri.removeprefix(f"{base}/"): info for info in list_objects(base)}
        self._cache_bytes: int = said["cache_bytes"]
        self._files: dict[str, BinaryIO] = {}
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="stream")
        self._lock = threading.Lock()
        #: What is here or on its way, the block that was longest unused first, and how many batches under way need it.
        self._here: OrderedDict[Block, Future[None]] = OrderedDict()
        self._needed: Counter[Block] = Counter()
        self._bytes = 0
        #: Bytes that came over the network, and the most that was kept at any time.
        self.fetched_bytes = self.most_bytes = 0

    def mapped(self, segment: str) -> np.ndarray:
        """The bytes of a segment (uint8, one-dimensional), of which those of fetched blocks are what they should be."""
        return np.memmap(self._file(segment), np.uint8, mode="r", shape=(self._artifact.files[segment].size,))

    def _file(self, segment: str) -> BinaryIO:
        with self._lock:
            if segment not in self._files:
                file = tempfile.TemporaryFile(dir=self._artifact.directory)  # noqa: SIM115
                os.truncate(file.fileno(), self._artifact.files[segment].size)
                self._files[segment] = file
            return self._files[segment]

    def ahead(self, items: Iterator[tuple[Item, list[Block]]]) -> Iterator[Item]:
        """Pass on each item once the blocks that it needs are here; the blocks of the next items are fetched meanwhile.
        The blocks of an item stay until the next item is asked for."""
        waiting: deque[tuple[Item, list[Block]]] = deque()
        try:
            for item, blocks in items:
                while waiting and not self._room(blocks, len(waiting)):
                    yield from self._take(waiting)
                for block in blocks:
                    self._ask(block)
                waiting.append((item, blocks))
            while waiting:
                yield from self._take(waiting)
        finally:
            self._done(block for _, blocks in waiting for block in blocks)

    def bring(self, blocks: list[Block]) -> None:
        """Return when these blocks are here; they stay."""
        for block in blocks:
            self._ask(block)
        for block in blocks:
            self._here[block].result()

    def _take(self, waiting: deque[tuple[Item, list[Block]]]) -> Iterator[Item]:
        item, blocks = waiting[0]
        for block in blocks:
            self._here[block].result()
        yield item
        waiting.popleft()
        self._done(blocks)

    def _room(self, blocks: list[Block], waiting: int) -> bool:
        """Whether these blocks may be asked for, so that what is needed takes no more than half of the cache."""
        with self._lock:
            needed = sum(self._size(block) for block in {*self._needed, *blocks})
        return waiting < AHEAD and needed <= self._cache_bytes // 2

    def _ask(self, block: Block) -> None:
        with self._lock:
            self._needed[block] += 1
            if block in self._here:
                self._here.move_to_end(block)
                return
            size = self._size(block)
            while self._bytes + size > self._cache_bytes:
                unused = (other for other, coming in self._here.items() if other not in self._needed and coming.done())
                if (longest := next(unused, None)) is None:
                    raise UserError(
                        f"profile.data_cache_gib: {self._cache_bytes / 2**30:.3g} GiB per process cannot hold the "
                        f"blocks of one batch; give more"
                    )
                self._drop(longest)
            self._bytes += size
            self.most_bytes = max(self.most_bytes, self._bytes)
            self._here[block] = self._pool.submit(self._fetch, block)

    def _done(self, blocks: Iterator[Block] | list[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._needed[block] -= 1
                if not self._needed[block]:
                    del self._needed[block]

    def _span(self, block: Block) -> tuple[int, int]:
        record = self._artifact.files[block[0]]
        start = block[1] * record.block_bytes
        return start, min(start + record.block_bytes, record.size)

    def _size(self, block: Block) -> int:
        start, end = self._span(block)
        return end - start

    def _fetch(self, block: Block) -> None:
        from tasks.storage.s3 import read_range

        segment, number = block
        start, end = self._span(block)
        source = self._objects[segment]
        data = read_range(source, start, end)
        try:
            self._artifact.check_block(segment, number, data)
        except DamagedArtifact:
            raise DamagedArtifact(f"{source.uri}: block {number} is not what was written") from None
        os.pwrite(self._file(segment).fileno(), data, start)
        self.fetched_bytes += len(data)

    def _drop(self, block: Block) -> None:
        del self._here[block]
        start, end = self._span(block)
        self._bytes -= end - start
        punch_hole(self._files[block[0]].fileno(), start, end - start)


KEEP_SIZE, PUNCH_HOLE = 1, 2


def punch_hole(descriptor: int, start: int, length: int) -> None:
    """Give the bytes back to the disk; they read as zeros. Raises ``OSError`` (fallocate(2), Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    places = (ctypes.c_int64(start), ctypes.c_int64(length))
    if libc.fallocate64(descriptor, KEEP_SIZE | PUNCH_HOLE, *places):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
