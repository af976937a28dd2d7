"""Order of the training rows: a pure function of seed, epoch and consumed samples, for any number of processes.

A global batch is an ordered list of G rows; rank r of W reads rows ``floor(rG/W)`` to ``floor((r+1)G/W)`` of it. So the
number of consumed samples is the only state of the loader. Every row occurs once per epoch; sizes need not be
divisible, so an epoch's last batch may be short.

Rows are stored shuffled within each segment (which may be several files), so any block is a random sample of its
segment. So an epoch can read block by block, which suits disk and cache, with batches as mixed as random ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

#: Version of this order. A checkpoint with another version cannot be resumed, since its step means other samples.
ORDER_VERSION = 2
#: Approximate number of lanes, and so of blocks that a batch mixes. More cause more cache misses; with fewer, more
#: ranks read the same block.
LANES = 8
#: Approximate number of runs of neighbouring rows that a batch reads per lane; runs are faster to read than single
#: rows.
RUNS = 16
#: Number of rows for which batches are planned at once; it takes little longer than planning one batch.
PLANNED_ROWS = 65_536
NO_ROWS = np.empty(0, np.int64)


def rank_slice(rank: int, world: int, length: int) -> slice:
    """Return the slice of a list of ``length`` items that belongs to ``rank``; all ranks' slices are consecutive."""
    return slice(rank * length // world, (rank + 1) * length // world)


def concatenate_ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the concatenation of all ``range(begin[i], end[i])`` (int64)."""
    lengths = end - begin
    numbers = np.repeat(end - np.cumsum(lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def random_permutation(length: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Return a random permutation of ``range(length)`` (int64), a pure function of the arguments."""
    # Sort Philox draws (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) that have their index in
    # the low bits. All draws are different, so every sorting algorithm gives the same result. Raw draws do not change
    # between versions of NumPy.
    index_bits = np.uint64(max(length - 1, 0).bit_length())
    draws = np.random.Philox(key=[seed, epoch], counter=[0, purpose, 0, 0]).random_raw(length)
    draws = draws >> index_bits << index_bits | np.arange(length, dtype=np.uint64)
    draws.sort()
    return (draws & (np.uint64(1) << index_bits) - np.uint64(1)).astype(np.int64)


class StoredBlocks:
    """Storage layout of a split: files ("segments") of blocks of ``block_rows`` rows.

    ``segments`` holds the row count of every file. Rows and blocks are numbered through all files; a file's last block
    may be short. ``shuffled`` holds the row count of every group of files shuffled together, by default of every file.
    """

    def __init__(self, segments: tuple[int, ...], block_rows: int, shuffled: tuple[int, ...] = ()) -> None:
        counts = [-(-rows // block_rows) for rows in segments]
        self.segments = segments
        self.shuffled = shuffled or segments
        self.block_rows = block_rows
        self.rows = sum(segments)
        self.count = sum(counts)
        #: int64 ``[blocks]``: the number of each block's file.
        self.segment = np.repeat(np.arange(len(segments)), counts)
        #: int64 ``[blocks]``: the number of each block in its file.
        self.within = np.concatenate([np.arange(count) for count in [*counts, 0]])
        #: int64 ``[blocks]``: the number of rows of each block.
        self.length = np.minimum(block_rows, np.asarray(segments, np.int64)[self.segment] - self.within * block_rows)
        #: int64 ``[blocks]``: the row number of each block's first row.
        self.first = np.cumsum(self.length) - self.length

    def block_of(self, row: int) -> int:
        return bisect_right(self.first, row) - 1


class BatchPlan(NamedTuple):
    """One rank's reads for one batch."""

    #: Row numbers (int64) in order.
    rows: np.ndarray
    #: Blocks to verify: those that this rank reads for the first time in the epoch, or since its start.
    blocks: list[int]
    #: Number of rows of the global batch.
    size: int
    #: Number of samples that the run has consumed including this batch.
    consumed: int


@dataclass(frozen=True)
class BlockSequence:
    """Order of the blocks in one epoch.

    Block ``block[i]`` starts at position ``start[i]`` of the epoch's sequence. Both are int64, ``[blocks]`` and
    ``[blocks + 1]``.
    """

    block: np.ndarray
    start: np.ndarray


# * The *sequence* of an epoch lists all rows. It is divided into strata. A stratum is a segment, or several segments
#   that are too small to be in every batch. Within a stratum the blocks are in random order. Within a block the rows
#   are in random order, the same for all blocks of equal length; this suffices, as a row's position in its block is
#   already random. For large batches a few neighbouring rows stay together, to be read at once.
# * Each stratum is divided into *lanes*, intervals of the sequence of equal length, about LANES in all. Every batch
#   takes rows from every lane in proportion to the lane's length. So it mixes as many blocks as there are lanes, and
#   contains all segments in the proportion of their sizes.
# * After D samples of an epoch of N samples, the lanes before position P of the sequence have contributed floor(P·D/N)
#   rows in all. So the lanes' counts sum to D. A lane's count never decreases with D, because every lane has at least
#   N/G rows.
#
# Lanes do not depend on the number of processes. A batch lists its rows lane by lane, so each rank reads the blocks of
# a few lanes only.
class GlobalOrder:
    """Endless order of the training rows, epoch after epoch, in batches of ``batch_size``."""

    def __init__(self, blocks: StoredBlocks, batch_size: int, seed: int) -> None:
        self.blocks = blocks
        self.batch_size = batch_size
        self.seed = seed
        self._strata = stratum_ends(blocks, batch_size)
        self._cuts = lane_boundaries(blocks, batch_size, self._strata)
        #: Approximate number of rows that a batch takes from one lane, to be read in ascending order.
        self._lane_rows = max(1, batch_size // (len(self._cuts) - 1))
        self._sequence = lru_cache(maxsize=2)(self._shuffle_blocks)
        self._within = lru_cache(maxsize=8)(self._shuffle_rows)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.blocks.rows // self.batch_size)

    @property
    def largest(self) -> int:
        """Number of rows of the largest batch."""
        return min(self.batch_size, self.blocks.rows)

    def consumed(self, step: int) -> int:
        """Return the number of samples that the first ``step`` steps of the run consume."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.blocks.rows + within * self.batch_size

    def batch(self, step: int) -> np.ndarray:
        """Return the row numbers (int64 ``[G]``) of the global batch of a step, counted from 0."""
        return next(self.plans(0, 1, self.consumed(step), self.consumed(step + 1))).rows

    def plans(self, rank: int, world: int, start: int = 0, stop: int | None = None) -> Iterator[BatchPlan]:
        """Yield the batch plans of ``rank`` from ``start`` to ``stop`` consumed samples; endless without ``stop``.

        Raises ``ValueError`` if no batch starts after ``start`` samples.
        """
        epoch, before = divmod(start, self.blocks.rows)
        step, rest = divmod(before, self.batch_size)
        if rest:
            raise ValueError(f"no batch of {self.batch_size} rows starts after {start} samples")
        at_once = max(1, PLANNED_ROWS // self.batch_size)
        verified: set[int] = set()
        while stop is None or start < stop:
            steps = min(at_once, self.steps_per_epoch - step)
            if stop is not None:
                steps = min(steps, -(-(stop - start) // self.batch_size))
            plans, verified = self._plan(epoch, step, steps, rank, world, verified)
            yield from plans
            start, step = plans[-1].consumed, step + steps
            if step == self.steps_per_epoch:
                epoch, step, verified = epoch + 1, 0, set()

    def reference_rows(self, epoch: int, step: int, rank: int, world: int) -> list[int]:
        """Return the rows of one batch of a rank, from all rows of the epoch: the definition of :meth:`_plan`."""
        total, length, first = self.blocks.rows, self.blocks.length.tolist(), self.blocks.first.tolist()
        sequence = [
            first[block] + row
            for block in self._sequence(epoch).block.tolist()
            for row in self._within(epoch, length[block]).tolist()
        ]
        before, after = (min(batches * self.batch_size, total) for batches in (step, step + 1))
        batch: list[int] = []
        for start, end in pairwise(self._cuts):
            given, next_given = (end * done // total - start * done // total for done in (before, after))
            batch += sequence[start + given : start + next_given]
        return batch[rank_slice(rank, world, len(batch))]

    def _plan(
        self, epoch: int, step: int, steps: int, rank: int, world: int, verified: set[int]
    ) -> tuple[list[BatchPlan], set[int]]:
        """Return the plans of ``steps`` steps, and all blocks that they use; ``verified`` are not verified again.

        The rows are those of :meth:`reference_rows`, computed for all steps and lanes at once.
        """
        # Arrays are int64 ``[steps, lanes]``. Of a lane's interval of the batch this rank reads from ``begin`` to
        # ``end``, which are the rows from ``first`` to ``last`` of the sequence.
        sequence, starts = self._sequence(epoch), np.asarray(self._cuts)
        done = np.minimum(np.arange(step, step + steps + 1) * self.batch_size, self.blocks.rows)
        given = starts * done[:, None] // self.blocks.rows
        bounds = np.diff(given, axis=0)
        sizes = np.diff(done).tolist()
        mine = [rank_slice(rank, world, size) for size in sizes]
        edges = np.array([(part.start, part.stop) for part in mine])
        begin, end = (np.clip(edge[:, None], bounds[:, :-1], bounds[:, 1:]) for edge in edges.T)
        first = starts[:-1] + np.diff(given[:-1], axis=1) + begin - bounds[:, :-1]
        last = first + end - begin
        used = (begin < end).any(axis=0)
        first, last = first[:, used], last[:, used]
        # The blocks that each lane reads in these steps, lane by lane, and all their rows.
        low = np.searchsorted(sequence.start, first[0], side="right") - 1
        high = np.searchsorted(sequence.start, last[-1])
        in_sequence = concatenate_ranges(low, high)
        block, lane = sequence.block[in_sequence], np.repeat(np.arange(len(low)), high - low)
        length = self.blocks.length[block]
        rows = np.repeat(self.blocks.first[block], length)
        rows += np.concatenate([NO_ROWS, *(self._within(epoch, rows) for rows in length.tolist())])
        # Offset from a position in the sequence to the same row in ``rows``, per lane.
        ahead = np.cumsum(length) - length
        shift = ahead[np.cumsum(high - low) - (high - low)] - sequence.start[low]
        taken = rows[concatenate_ranges((first + shift).ravel(), (last + shift).ravel())]
        due: dict[int, int] = {}
        needed = np.count_nonzero(last[:, lane] <= sequence.start[in_sequence], axis=0)
        for number, at in zip(block.tolist(), needed.tolist(), strict=True):
            # Two lanes need the block that contains their common boundary.
            due[number] = min(at, due.get(number, at))
        fresh: list[list[int]] = [[] for _ in range(steps)]
        for number, at in due.items():
            if number not in verified:
                fresh[at].append(number)
        ends = np.cumsum((end - begin).sum(axis=1)).tolist()
        consumed = (epoch * self.blocks.rows + done[1:]).tolist()
        plans = [
            BatchPlan(taken[begins:ends], blocks, size, after)
            for (begins, ends), blocks, size, after in zip(pairwise([0, *ends]), fresh, sizes, consumed, strict=True)
        ]
        return plans, set(due)

    def _shuffle_rows(self, epoch: int, length: int) -> np.ndarray:
        """Return the order of rows (int64) within every block of ``length`` rows."""
        run = max(1, self._lane_rows // RUNS)
        order = random_permutation(-(-length // run), self.seed, epoch, length)[:, None] * run + np.arange(run)
        order = order[order < length]
        # The rows of one batch are sorted, because memory is read faster in ascending order.
        whole = length - length % self._lane_rows
        order[:whole].reshape(-1, self._lane_rows).sort(axis=1)
        order[whole:].sort()
        return order

    def _shuffle_blocks(self, epoch: int) -> BlockSequence:
        """Return the order of the blocks in an epoch: stratum by stratum, random within a stratum."""
        block = random_permutation(self.blocks.count, self.seed, epoch, 0)
        stratum = np.searchsorted(self._strata, self.blocks.first[block], side="right")
        block = block[np.argsort(stratum, kind="stable")]
        start = np.concatenate([[0], np.cumsum(self.blocks.length[block])])
        return BlockSequence(block, start)


def stratum_ends(blocks: StoredBlocks, batch_size: int) -> list[int]:
    """Return the end of every stratum, as a number of rows.

    A stratum is a group of files, joined with the next while it has too few rows to be in every batch.
    """
    least = -(-blocks.rows // batch_size)
    ends = [0]
    for end in accumulate(blocks.shuffled):
        if end - ends[-1] >= least:
            ends.append(end)
    return [*ends[1:-1], blocks.rows]


def lane_boundaries(blocks: StoredBlocks, batch_size: int, ends: list[int]) -> list[int]:
    """Return the boundaries of the lanes in the sequence, ascending, from 0 to the number of rows."""
    least = -(-blocks.rows // batch_size)
    boundaries = [0]
    for begin, end in pairwise([0, *ends]):
        rows = end - begin
        lanes = max(1, min(LANES * rows // blocks.rows, rows // least, rows // blocks.block_rows))
        boundaries += [begin + rows * lane // lanes for lane in range(1, lanes + 1)]
    return boundaries


class StoredOrder:
    """Order of evaluation: one pass over the rows of ``blocks`` in stored order.

    Each rank divides its contiguous rows into batches of at most ``batch_size``.
    """

    def __init__(self, blocks: StoredBlocks, batch_size: int) -> None:
        self.blocks = blocks
        self.batch_size = batch_size

    @property
    def largest(self) -> int:
        """Number of rows of the largest batch."""
        return min(self.batch_size, self.blocks.rows)

    def batches(self, rank: int, world: int) -> int:
        mine = rank_slice(rank, world, self.blocks.rows)
        return -(-(mine.stop - mine.start) // self.batch_size)

    def plans(self, rank: int, world: int, rounds: int = 0) -> Iterator[BatchPlan]:
        """Yield the batch plans of ``rank``, at least ``rounds``; additional plans have no rows.

        A plan's ``consumed`` is the number of the row after its batch.
        """
        mine, read = rank_slice(rank, world, self.blocks.rows), -1
        starts = range(mine.start, mine.stop, self.batch_size)
        for start in starts:
            stop = min(start + self.batch_size, mine.stop)
            of_start, of_last = (self.blocks.block_of(row) for row in (start, stop - 1))
            yield BatchPlan(
                np.arange(start, stop), list(range(max(of_start, read + 1), of_last + 1)), stop - start, stop
            )
            read = of_last
        for _ in range(len(starts), rounds):
            yield BatchPlan(NO_ROWS, [], 0, mine.stop)
