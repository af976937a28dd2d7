"""Global shuffle: an external merge sort of the rows by random keys.

The key of a row depends only on its number (:func:`slipstream.shared.source.columns.identity.row_keys`), so the order
depends neither on the number of processes nor on memory. Units are written as runs, sorted by key within each batch. A
part of a split is an equal range of keys. Parts are merged independently, in smaller ranges that fit memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from slipstream.pipeline.prepare.progress import with_progress
from slipstream.shared.artifacts.format import ArtifactWriter, FileRecord
from slipstream.shared.artifacts.prepared.data import SPLITS, segment_name
from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.source.columns.identity import row_keys

#: Rows per block of the manifest, fewer if rows are wide. Blocks are verified separately, and all blocks of a batch
#: must stay in the CPU cache between verification and use.
BLOCK_ROWS = 4096
BLOCK_BYTES = 1 << 19
#: Approximate largest size of a part in bytes. Smaller parts let more processes merge, but a batch then reads from more
#: files. Above ``MOST_PARTS`` parts they grow instead, because each part reads from all runs.
PART_BYTES = 1 << 30
MOST_PARTS = 256
#: Number of bytes merged at once.
BUCKET_BYTES = 16 << 20
ORDER_SEED = 2


def order_keys(first: int, rows: int, total: int, shuffle: bool) -> np.ndarray:
    """Return uint64 keys of ``rows`` rows from number ``first`` of ``total``: random if ``shuffle``, else ascending."""
    if shuffle:
        return row_keys(first, rows, ORDER_SEED)
    return np.arange(first, first + rows, dtype=np.uint64) * np.uint64(2**64 // total - (total == 1))


def block_rows(itemsize: int) -> int:
    """Return the number of rows per block for records of ``itemsize`` bytes, a power of two."""
    return min(BLOCK_ROWS, 1 << (max(1, BLOCK_BYTES // itemsize).bit_length() - 1))


@dataclass(frozen=True)
class SortedRun:
    """Sorted run: ``rows`` records of one split, starting at row ``start`` of the files ``path``.rows and .keys."""

    path: str
    split: int
    start: int
    rows: int


class RunWriter:
    """Writer of one unit's runs: records in one file and their keys (uint64) in another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = Path(f"{path}.rows").open("wb")  # noqa: SIM115 - closed by __exit__
        self._keys = Path(f"{path}.keys").open("wb")  # noqa: SIM115
        self._hashes = {"rows": xxhash.xxh3_128(), "keys": xxhash.xxh3_128()}
        self._rows = 0
        self.runs: list[SortedRun] = []

    @property
    def digests(self) -> dict[str, str]:
        """XXH3-128 (hex) of the written files by path, computed while writing."""
        return {f"{self._path}.{part}": state.hexdigest() for part, state in self._hashes.items()}

    def add(self, split: int, chosen: np.ndarray, order: np.ndarray, records: np.ndarray) -> None:
        """Write the rows ``chosen`` of a batch as a run of ``split``; ``order`` holds the keys of the whole batch."""
        if len(chosen) == 0:
            return
        ascending = chosen[np.argsort(order[chosen])]
        for part, file, data in (
            ("keys", self._keys, order[ascending].data),
            ("rows", self._records, as_bytes(records).take(ascending, axis=0).data),
        ):
            file.write(data)
            self._hashes[part].update(data)
        self.runs.append(SortedRun(str(self._path), split, self._rows, len(ascending)))
        self._rows += len(ascending)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._records.close()
        self._keys.close()


def as_bytes(records: np.ndarray) -> np.ndarray:
    """Return a structured array as uint8 ``[rows, itemsize]``, which NumPy copies by rows instead of by fields."""
    return np.ascontiguousarray(records).view(np.uint8).reshape(len(records), records.dtype.itemsize)


@dataclass(frozen=True)
class SplitPart:
    """Part of a split: the rows whose keys lie in range ``number`` of ``of`` equal ranges."""

    split: int
    number: int = 0
    of: int = 1


def split_parts(split: int, rows: int, itemsize: int) -> list[SplitPart]:
    """Return the parts of a split of ``rows`` records; they depend only on its size."""
    count = min(MOST_PARTS, max(1, -(-rows * itemsize // PART_BYTES)))
    return [SplitPart(split, number, count) for number in range(count)]


def write_merged_part(writer: ArtifactWriter, name: str, runs: list[SortedRun], itemsize: int, part: SplitPart) -> None:
    """Write the rows of ``part`` to the file ``name`` in key order."""
    with writer.create(name, block_bytes=block_rows(itemsize) * itemsize) as file, ThreadPoolExecutor(1) as ahead:
        # Gathering and hashing both release the GIL, so the next chunk is gathered meanwhile.
        pieces = merged_rows(runs, itemsize, part)
        coming = ahead.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = ahead.submit(next, pieces, None)
            file.write(piece.records)


def collect_run(path: Path, runs: list[SortedRun], itemsize: int, part: SplitPart) -> SortedRun:
    """Write all rows of ``part`` as one run to the files ``path``.rows and .keys."""
    rows = 0
    with Path(f"{path}.keys").open("wb") as keys_file, Path(f"{path}.rows").open("wb") as records_file:
        for piece in merged_rows(runs, itemsize, part):
            keys_file.write(piece.keys.data)
            records_file.write(piece.records.data)
            rows += len(piece.keys)
    return SortedRun(str(path), part.split, 0, rows)


class KeyedRows(NamedTuple):
    """Consecutive rows in key order: ``keys`` (uint64) and ``records`` (uint8 ``[rows, itemsize]``)."""

    keys: np.ndarray
    records: np.ndarray


def merged_rows(runs: list[SortedRun], itemsize: int, part: SplitPart) -> Iterator[KeyedRows]:
    """Yield the rows of ``part`` in key order, one smaller range of keys at a time.

    The arrays are reused: a piece is overwritten when the second piece after it is requested.
    """
    runs = [run for run in runs if run.split == part.split and run.rows]
    # Truncating a mapped file would kill the process with a bus error. These files are safe: they are in this run's
    # scratch directory, nothing else writes to them, and those of an earlier attempt were verified. They are searched
    # at many positions.
    files = {path: np.memmap(f"{path}.keys", np.uint64, "r") for path in {run.path for run in runs}}
    keys_of = [files[run.path][run.start : run.start + run.rows] for run in runs]
    ends = [range_bounds(ascending, part.number, part.number + 1, part.of) for ascending in keys_of]
    buckets = max(1, -(-sum(end - start for start, end in ends) * itemsize // BUCKET_BYTES))
    first, last, of = part.number * buckets, (part.number + 1) * buckets, part.of * buckets
    cuts = [range_bounds(ascending, first, last, of) for ascending in keys_of]
    largest = max((sum(edges[b + 1] - edges[b] for edges in cuts) for b in range(buckets)), default=0)
    gathered, *spare = (np.empty((largest, itemsize), np.uint8) for _ in range(3))
    for bucket in range(buckets):
        slices = [
            RunSlice(run, ascending, *edges[bucket : bucket + 2])
            for run, ascending, edges in zip(runs, keys_of, cuts, strict=True)
        ]
        slices = [one for one in slices if one.end > one.start]
        if not slices:
            continue
        rows = gather_records(slices, gathered)
        unordered = np.concatenate([one.keys for one in slices])
        order = np.argsort(unordered)
        # "clip" writes into `out` directly; "raise" would copy twice. All rows are in range.
        records = gathered[:rows].take(order, axis=0, out=spare[bucket % 2][:rows], mode="clip")
        yield KeyedRows(unordered[order], records)


def range_bounds(ascending: np.ndarray, first: int, last: int, of: int) -> list[int]:
    """Return the indices that bound ranges ``first`` to ``last`` (exclusive) of ``of`` equal ranges in sorted keys."""
    edges = np.array([number * 2**64 // of for number in range(first, min(last, of - 1) + 1)], np.uint64)
    indices: list[int] = np.searchsorted(ascending, edges).tolist()
    return indices if last < of else [*indices, len(ascending)]


class RunSlice(NamedTuple):
    """Rows ``start`` to ``end`` of a run; ``of_run`` are the keys of the whole run."""

    run: SortedRun
    of_run: np.ndarray
    start: int
    end: int

    @property
    def keys(self) -> np.ndarray:
        return self.of_run[self.start : self.end]


def gather_records(slices: list[RunSlice], out: np.ndarray) -> int:
    """Read the records of the slices into ``out`` (uint8 ``[rows, itemsize]``) and return their number."""
    at, itemsize = 0, out.shape[1]
    for path, of_one_file in groupby(slices, lambda one: one.run.path):
        with Path(f"{path}.rows").open("rb", buffering=0) as source:
            for one in of_one_file:
                end = at + one.end - one.start
                source.seek((one.run.start + one.start) * itemsize)
                fill(source, out[at:end])
                at = end
    return at


def fill(source: FileIO, target: np.ndarray) -> None:
    view = memoryview(target.data).cast("B")
    while len(view):
        count = source.readinto(view)
        if not count:
            raise OSError("a run file ends too early")
        view = view[count:]


# Units of work, and their results in the artifact


@dataclass(frozen=True)
class MergeJob:
    """Job of one worker: merge a part from the ``runs`` of its split into a directory in ``scratch``."""

    scratch: Path
    part: SplitPart
    runs: list[SortedRun]
    itemsize: int


@dataclass(frozen=True)
class MergedPart:
    """Merged part in the form in which it enters the artifact."""

    file: Path
    part: SplitPart
    record: FileRecord

    @property
    def digests(self) -> dict[str, str]:
        return {str(self.file): self.record.sha256}

    def enter(self, writer: ArtifactWriter, name: str) -> None:
        """Link this part as the file ``name`` of an artifact."""
        writer.link(self.file, name, self.record)


def all_parts(rows: Sequence[int], itemsize: int) -> list[SplitPart]:
    """Return the parts of all splits; ``rows`` has the number of rows of every split."""
    return [part for split, count in enumerate(rows) for part in split_parts(split, count, itemsize)]


def merge_all(scratch: ResumableScratch, runs: list[SortedRun], itemsize: int) -> list[MergedPart]:
    """Merge all splits from ``runs`` of records of ``itemsize`` bytes."""
    rows = [sum(run.rows for run in runs if run.split == split) for split in range(len(SPLITS))]
    parts = all_parts(rows, itemsize)
    shares = [rows[p.split] * (p.number + 1) // p.of - rows[p.split] * p.number // p.of for p in parts]
    return list(with_progress("merge", merge_parts(scratch, parts, runs, itemsize), shares))


def merge_parts(
    scratch: ResumableScratch, parts: list[SplitPart], runs: list[SortedRun], itemsize: int
) -> Iterator[MergedPart]:
    of_split = [[run for run in runs if run.split == split] for split in range(len(SPLITS))]
    return scratch.map(merge_part, (MergeJob(scratch.root, part, of_split[part.split], itemsize) for part in parts))


def merge_part(job: MergeJob) -> MergedPart:
    name = f"{SPLITS[job.part.split]}-{job.part.number}"
    directory = job.scratch / name
    shutil.rmtree(directory, ignore_errors=True)
    writer = ArtifactWriter(directory)
    write_merged_part(writer, f"{name}.rows", job.runs, job.itemsize, job.part)
    return MergedPart(directory / f"{name}.rows", job.part, writer.record(f"{name}.rows"))


def enter_segments(writer: ArtifactWriter, merged: list[MergedPart], number: int) -> None:
    """Add the parts of every split to the artifact, in order, as segment ``number``.

    Parts without rows are skipped; only segment 0 of a split may be empty.
    """
    for split, name in enumerate(SPLITS):
        mine = [part for part in merged if part.part.split == split]
        filled = [part for part in mine if part.record.size] or (mine[:1] if number == 0 else [])
        for index, part in enumerate(filled):
            part.enter(writer, segment_name(name, number, index))
