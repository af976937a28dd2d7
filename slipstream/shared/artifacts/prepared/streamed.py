"""Prepared data that stays in a store; its blocks are prefetched into a bounded local disk cache.

A *stub* is a local copy of the artifact with sparse, empty ``.rows`` files; its ``remote.json`` holds the URI of the
rows and the size of the cache. Every process that opens a stub caches blocks in its own unnamed sparse files, which the
system removes when the process ends. Blocks are verified before they enter the cache. A block that was not fetched
reads as zeros and fails its digest check.
"""

from __future__ import annotations

import ctypes
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

from slipstream.shared.artifacts.format import MANIFEST, Artifact, DamagedArtifact, Manifest
from slipstream.shared.artifacts.prepared.data import Block, PreparedData
from slipstream.shared.artifacts.records import from_json, to_json
from slipstream.shared.errors import UserError
from slipstream.shared.storage import list_names, path_below, read_range, storage_for

STUB = "remote.json"
ROWS = ".rows"
#: Concurrent ranged requests per process.
REQUESTS = 16
#: Largest number of items (such as batches) whose blocks are prefetched.
AHEAD = 64

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stub:
    """Contents of ``remote.json``: URI of the rows, and the cache size of one process in bytes."""

    uri: str
    cache_bytes: int


def artifact_size(uri: str) -> int:
    """Return the size in bytes of the artifact at ``uri``, from its manifest. Raises ``UserError`` if it has none."""
    with tempfile.TemporaryDirectory() as scratch:
        return sum(record.size for record in manifest_at(uri, Path(scratch)).files.values())


def manifest_at(uri: str, directory: Path) -> Manifest:
    """Download the manifest of the artifact at ``uri`` into ``directory`` and return it.

    Raises ``UserError`` if there is none.
    """
    return Manifest.parse(storage_for(uri).get(MANIFEST, directory).read_bytes(), f"{uri.rstrip('/')}/{MANIFEST}")


def make_hole(directory: Path, name: str, size: int) -> None:
    """Create the sparse file ``name`` of ``size`` bytes, for a file whose content stays in the store."""
    path = path_below(directory, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)


def make_stub(uri: str, directory: Path, cache_bytes: int | None = None) -> Path:
    """Create a stub of the prepared data at ``uri`` in the new ``directory``.

    Every process that opens it may cache ``cache_bytes`` of rows; None means all. Raises ``UserError`` if there is no
    artifact, ``StorageUnavailable`` if the store does not answer.
    """
    storage = storage_for(uri)
    directory.mkdir(parents=True)
    files = manifest_at(uri, directory).files
    for name, record in files.items():
        if name.endswith(ROWS):
            make_hole(directory, name, record.size)
        else:
            storage.get(name, directory)
    if cache_bytes is None:
        cache_bytes = sum(record.size for record in files.values())
    (directory / STUB).write_bytes(to_json(Stub(uri, cache_bytes)))
    return directory


@dataclass(frozen=True)
class StreamedData(PreparedData):
    """Prepared data whose blocks are downloaded by ``stream``: prefetched, or when first read."""

    stream: BlockStream

    def verified(self, blocks: list[Block]) -> Iterator[np.ndarray]:
        self.stream.fetch(blocks)
        yield from super().verified(blocks)

    def mapped(self, segment: str) -> np.ndarray:
        return self.stream.mapped(segment).reshape(-1, self.signature.record.itemsize)


def open_prepared(directory: Path) -> PreparedData:
    """Open prepared data or a stub of it in ``directory``. Raises ``DamagedArtifact`` if it is incomplete."""
    data = PreparedData.open(directory)
    return (
        StreamedData(data.artifact, data.signature, BlockStream(data.artifact)) if (directory / STUB).exists() else data
    )


class BlockStream:
    """Disk cache of a stub's blocks in this process; several iterators may share it."""

    def __init__(self, artifact: Artifact) -> None:
        with artifact.open_file(STUB) as file:
            stub = from_json(file.read(), Stub, artifact.directory / STUB)
        self._artifact = artifact
        self._objects = list_names(stub.uri)
        for name in (name for name in artifact.files if name.endswith(ROWS)):
            size = self._objects[name].size if name in self._objects else None
            if size != artifact.files[name].size:
                what = "missing" if size is None else f"{size:,} bytes, the manifest says {artifact.files[name].size:,}"
                raise DamagedArtifact(f"{stub.uri.rstrip('/')}/{name}: {what}; prepare the data again, or restore it")
        self._cache_bytes = stub.cache_bytes
        self._files: dict[str, BinaryIO] = {}
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="stream")
        self._lock = threading.Lock()
        #: Cached or requested blocks, least recently used first.
        self._cached: OrderedDict[Block, Future[None]] = OrderedDict()
        #: Number of pending items that need a block; needed blocks are not evicted.
        self._needed: Counter[Block] = Counter()
        self._bytes = 0
        #: Bytes downloaded so far, and the largest size of the cache so far.
        self.fetched_bytes = self.most_bytes = 0

    def mapped(self, segment: str) -> np.ndarray:
        """Memory-map the file ``segment`` as uint8 ``[size]``; blocks that were not fetched are zeros."""
        # The file has no name, so no other process can truncate it below the mapping.
        return np.memmap(self._file(segment), np.uint8, mode="r", shape=(self._artifact.files[segment].size,))

    def _file(self, segment: str) -> BinaryIO:
        with self._lock:
            if segment not in self._files:
                file = tempfile.TemporaryFile(dir=self._artifact.directory)  # noqa: SIM115
                os.truncate(file.fileno(), self._artifact.files[segment].size)
                self._files[segment] = file
            return self._files[segment]

    def prefetch(self, items: Iterator[tuple[Item, list[Block]]]) -> Iterator[Item]:
        """Yield every item once its blocks are cached, while the blocks of later items are downloaded.

        An item's blocks stay in the cache until the next is requested.
        """
        pending: deque[tuple[Item, list[Block]]] = deque()
        try:
            for item, blocks in items:
                while pending and not self._fits(blocks, len(pending)):
                    yield from self._next(pending)
                for block in blocks:
                    self._request(block)
                pending.append((item, blocks))
            while pending:
                yield from self._next(pending)
        finally:
            self._release(block for _, blocks in pending for block in blocks)

    def fetch(self, blocks: list[Block]) -> None:
        """Download these blocks, keep them in the cache for good, and return when all are cached."""
        for block in blocks:
            self._request(block)
        for block in blocks:
            self._cached[block].result()

    def _next(self, pending: deque[tuple[Item, list[Block]]]) -> Iterator[Item]:
        item, blocks = pending[0]
        for block in blocks:
            self._cached[block].result()
        yield item
        pending.popleft()
        self._release(blocks)

    def _fits(self, blocks: list[Block], pending: int) -> bool:
        """Return True if ``blocks`` may be requested.

        Fewer than ``AHEAD`` items must be pending, and needed blocks may take at most half of the cache.
        """
        with self._lock:
            needed = sum(self._size(block) for block in {*self._needed, *blocks})
        return pending < AHEAD and needed <= self._cache_bytes // 2

    def _request(self, block: Block) -> None:
        """Mark a block as needed until :meth:`_release`; download it if uncached, evicting unneeded blocks."""
        with self._lock:
            self._needed[block] += 1
            if block in self._cached:
                self._cached.move_to_end(block)
                return
            size = self._size(block)
            while self._bytes + size > self._cache_bytes:
                unused = (
                    other for other, fetched in self._cached.items() if other not in self._needed and fetched.done()
                )
                if (oldest := next(unused, None)) is None:
                    raise UserError(
                        f"profile.data_cache_gib: {self._cache_bytes / 2**30:.3g} GiB per process cannot hold the "
                        "blocks of one batch; increase it"
                    )
                self._evict(oldest)
            self._bytes += size
            self.most_bytes = max(self.most_bytes, self._bytes)
            self._cached[block] = self._pool.submit(self._fetch, block)

    def _release(self, blocks: Iterator[Block] | list[Block]) -> None:
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
        segment, number = block
        start, end = self._span(block)
        source = self._objects[segment]
        data = read_range(source, start, end)
        try:
            self._artifact.check_block(segment, number, data)
        except DamagedArtifact:
            raise DamagedArtifact(f"{source.uri}: block {number} was changed after it was written") from None
        os.pwrite(self._file(segment).fileno(), data, start)
        self.fetched_bytes += len(data)

    def _evict(self, block: Block) -> None:
        del self._cached[block]
        start, end = self._span(block)
        self._bytes -= end - start
        punch_hole(self._files[block[0]].fileno(), start, end - start)


KEEP_SIZE, PUNCH_HOLE = 1, 2


def punch_hole(descriptor: int, start: int, length: int) -> None:
    """Free the disk space of a byte range, which then reads as zeros (Linux, fallocate(2)). Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    places = (ctypes.c_int64(start), ctypes.c_int64(length))
    if libc.fallocate64(descriptor, KEEP_SIZE | PUNCH_HOLE, *places):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
