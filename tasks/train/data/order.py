"""Which rows make up which batch: a pure function of (seed, epoch, samples consumed), for any number of processes.

A global batch is an ordered list of G rows, of which rank r of W takes those from ``floor(rG/W)`` to
``floor((r+1)G/W)``. So there is no loader state, no worker state and no rank state: the number of samples consumed says
everything, no divisibility is asked of the user, no row is lost and none comes twice; an epoch's tail is a short last
batch.

Rows are stored shuffled within each segment, which may be several files, so that any block is a fair sample of its
segment and an epoch can go block by block, which a disk and a cache like, without batches that differ more than chance
makes them:

* The *tape* of an epoch: within each stratum (a segment, or several that are too small to be in every batch) the
  blocks in a random order, within each block the rows in a random order, the same for all blocks of a length: where a
  row lies in its block is random already, and so large batches take a few neighbours together.
* Each stratum is cut into *lanes*, runs of the tape of equal length, about :data:`LANES` in all. Every batch takes
  rows from every lane in proportion to the lane's length, so that it mixes as many blocks as there are lanes, and all
  segments in the proportion in which they occur, however much they differ.
* After D samples of an epoch of N the lanes before a cut P of the tape have given ``floor(P·D/N)`` rows. These counts
  add up to D by construction, and never fall as long as a lane holds at least N/G rows, which is how the cuts are made.

Lanes know nothing of the world. A batch lists its rows lane by lane, so a rank reads the blocks of few lanes only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

#: Of the order itself: a checkpoint that was made in another one cannot find its place.
ORDER_VERSION = 2
#: How many blocks a batch mixes; more of them cost cache misses, fewer make more ranks read the same block.
LANES = 8
#: In about how many runs of neighbours a batch takes its rows of a lane: memory gives those faster than single rows.
RUNS = 16
#: How many rows are planned at once, which costs little more than planning one batch.
PLANNED_ROWS = 65_536
NO_ROWS = np.empty(0, np.int64)


def share(rank: int, world: int, length: int) -> slice:
    """The part of an ordered list of ``length`` that ``rank`` of ``world`` takes; the parts follow each other."""
    return slice(rank * length // world, (rank + 1) * length // world)


def ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The numbers from ``begin[i]`` to ``end[i]``, one range after the other (int64)."""
    lengths = end - begin
    numbers = np.repeat(end - np.cumsum(lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def shuffled(length: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """A random permutation of ``range(length)`` (int64), a pure function of its arguments.

    Sorts Philox draws (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) that carry their index
    in the low bits: no two are equal, so that every sort gives the same, and the raw draws are the part of numpy's
    generators that no version changes.
    """
    index_bits = np.uint64(max(length - 1, 0).bit_length())
    draws = np.random.Philox(key=[seed, epoch], counter=[0, purpose, 0, 0]).random_raw(length)
    draws = draws >> index_bits << index_bits | np.arange(length, dtype=np.uint64)
    draws.sort()
    return (draws & (np.uint64(1) << index_bits) - np.uint64(1)).astype(np.int64)


class Layout:
    """How the rows of a split are stored: segments one after the other, each in blocks of ``block_rows``.

    Blocks are numbered through all segments; a segment's last block may be short. Rows are numbered through, too.
    ``shuffled`` says how many rows were shuffled together, where a segment's are spread over several ``segments``.
    """

    def __init__(self, segments: tuple[int, ...], block_rows: int, shuffled: tuple[int, ...] = ()) -> None:
        counts = [-(-rows // block_rows) for rows in segments]
        self.segments = segments
        self.shuffled = shuffled or segments
        self.block_rows = block_rows
        self.rows = sum(segments)
        self.blocks = sum(counts)
        #: int64 ``[blocks]``: the segment of each block, its number in the segment, and how many rows it has.
        self.segment = np.repeat(np.arange(len(segments)), counts)
        self.within = np.concatenate([np.arange(count) for count in [*counts, 0]])
        self.length = np.minimum(block_rows, np.asarray(segments, np.int64)[self.segment] - self.within * block_rows)
        #: int64 ``[blocks]``: the number of each block's first row.
        self.first = np.cumsum(self.length) - self.length

    def block_of(self, row: int) -> int:
        """The number of the block that has the row."""
        return bisect_right(self.first, row) - 1


class BatchPlan(NamedTuple):
    """What one rank reads for one batch.

    ``rows`` are row numbers (int64), in order; ``blocks`` are the numbers of the blocks that the rank has not read
    since the beginning of the epoch or of its reading. ``size`` counts the rows of the whole batch over all ranks,
    ``consumed`` the samples of the run after it.
    """

    rows: np.ndarray
    blocks: list[int]
    size: int
    consumed: int


@dataclass(frozen=True)
class BlockSequence:
    """The blocks of one epoch in their order; ``start[i]`` is the place on the tape where ``block[i]`` begins (int64,
    ``[blocks]`` and ``[blocks + 1]``)."""

    block: np.ndarray
    start: np.ndarray


class GlobalOrder:
    """The endless order of training: the rows of ``layout``, epoch after epoch, in batches of ``batch_size``."""

    def __init__(self, layout: Layout, batch_size: int, seed: int) -> None:
        self.layout = layout
        self.batch_size = batch_size
        self.seed = seed
        self._strata = strata(layout, batch_size)
        self._cuts = cuts(layout, batch_size, self._strata)
        #: About the rows that a batch takes from one lane, which are read in ascending order.
        self._group = max(1, batch_size // (len(self._cuts) - 1))
        self._tape = lru_cache(maxsize=2)(self._lay)
        self._within = lru_cache(maxsize=8)(self._mix)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.layout.rows // self.batch_size)

    @property
    def largest(self) -> int:
        """The rows of the largest batch."""
        return min(self.batch_size, self.layout.rows)

    def consumed(self, step: int) -> int:
        """The samples consumed when ``step`` steps of the run are done."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.layout.rows + within * self.batch_size

    def batch(self, step: int) -> np.ndarray:
        """The global batch of the ``step``-th step of the run, counted from 0: int64 row numbers ``[G]``."""
        return next(self.plans(0, 1, self.consumed(step), self.consumed(step + 1))).rows

    def plans(self, rank: int, world: int, start: int = 0, stop: int | None = None) -> Iterator[BatchPlan]:
        """What ``rank`` of ``world`` reads, batch by batch, from ``start`` to ``stop`` samples consumed, or endlessly.

        Raises ``ValueError`` if no batch begins after ``start`` samples.
        """
        epoch, before = divmod(start, self.layout.rows)
        step, rest = divmod(before, self.batch_size)
        if rest:
            raise ValueError(f"no batch of {self.batch_size} rows begins after {start} samples")
        at_once = max(1, PLANNED_ROWS // self.batch_size)
        known: set[int] = set()
        while stop is None or start < stop:
            steps = min(at_once, self.steps_per_epoch - step)
            if stop is not None:
                steps = min(steps, -(-(stop - start) // self.batch_size))
            plans, known = self._plan(epoch, step, steps, rank, world, known)
            yield from plans
            start, step = plans[-1].consumed, step + steps
            if step == self.steps_per_epoch:
                epoch, step, known = epoch + 1, 0, set()

    def _plan(
        self, epoch: int, step: int, steps: int, rank: int, world: int, known: set[int]
    ) -> tuple[list[BatchPlan], set[int]]:
        """The plans of ``steps`` steps, and the blocks that they use, given those ``known`` before.

        Arrays are int64 ``[steps, lanes]``: of the batch's places that a lane fills, the rank's share begins at
        ``begin`` and ends at ``end``, and what goes there lies on the tape from ``first`` to ``last``.
        """
        tape, starts = self._tape(epoch), np.asarray(self._cuts)
        done = np.minimum(np.arange(step, step + steps + 1) * self.batch_size, self.layout.rows)
        given = starts * done[:, None] // self.layout.rows
        place = np.diff(given, axis=0)
        sizes = np.diff(done).tolist()
        mine = [share(rank, world, size) for size in sizes]
        edges = np.array([(part.start, part.stop) for part in mine])
        begin, end = (np.clip(edge[:, None], place[:, :-1], place[:, 1:]) for edge in edges.T)
        first = starts[:-1] + np.diff(given[:-1], axis=1) + begin - place[:, :-1]
        last = first + end - begin
        used = (begin < end).any(axis=0)
        first, last = first[:, used], last[:, used]
        # What lies on the tape below each lane in these steps, one lane after the other: blocks, and their rows.
        low = np.searchsorted(tape.start, first[0], side="right") - 1
        high = np.searchsorted(tape.start, last[-1])
        on_tape = ranges(low, high)
        block, lane = tape.block[on_tape], np.repeat(np.arange(len(low)), high - low)
        length = self.layout.length[block]
        rows = np.repeat(self.layout.first[block], length)
        rows += np.concatenate([NO_ROWS, *(self._within(epoch, rows) for rows in length.tolist())])
        # From a place on the tape to one in ``rows``, for each lane.
        ahead = np.cumsum(length) - length
        shift = ahead[np.cumsum(high - low) - (high - low)] - tape.start[low]
        taken = rows[ranges((first + shift).ravel(), (last + shift).ravel())]
        due: dict[int, int] = {}
        needed = np.count_nonzero(last[:, lane] <= tape.start[on_tape], axis=0)
        for number, at in zip(block.tolist(), needed.tolist(), strict=True):
            # Where lanes meet inside a block, both need it.
            due[number] = min(at, due.get(number, at))
        fresh: list[list[int]] = [[] for _ in range(steps)]
        for number, at in due.items():
            if number not in known:
                fresh[at].append(number)
        ends = np.cumsum((end - begin).sum(axis=1)).tolist()
        consumed = (epoch * self.layout.rows + done[1:]).tolist()
        plans = [
            BatchPlan(taken[begins:ends], blocks, size, after)
            for (begins, ends), blocks, size, after in zip(pairwise([0, *ends]), fresh, sizes, consumed, strict=True)
        ]
        return plans, set(due)

    def _mix(self, epoch: int, length: int) -> np.ndarray:
        """The order of the rows in a block of ``length`` rows."""
        run = max(1, self._group // RUNS)
        order = shuffled(-(-length // run), self.seed, epoch, length)[:, None] * run + np.arange(run)
        order = order[order < length]
        # Which runs go together is random; among themselves they ascend, since memory is read faster upwards.
        whole = length - length % self._group
        order[:whole].reshape(-1, self._group).sort(axis=1)
        order[whole:].sort()
        return order

    def _lay(self, epoch: int) -> BlockSequence:
        block = shuffled(self.layout.blocks, self.seed, epoch, 0)
        stratum = np.searchsorted(self._strata, self.layout.first[block], side="right")
        block = block[np.argsort(stratum, kind="stable")]
        start = np.concatenate([[0], np.cumsum(self.layout.length[block])])
        return BlockSequence(block, start)


def strata(layout: Layout, batch_size: int) -> list[int]:
    """Where strata end: segments, small ones joined with the next until they are worth a row of every batch."""
    least = -(-layout.rows // batch_size)
    ends = [0]
    for end in accumulate(layout.shuffled):
        if end - ends[-1] >= least:
            ends.append(end)
    return [*ends[1:-1], layout.rows]


def cuts(layout: Layout, batch_size: int, ends: list[int]) -> list[int]:
    """Where lanes begin and end on the tape: ascending, from 0 to the number of rows."""
    least = -(-layout.rows // batch_size)
    found = [0]
    for begin, end in pairwise([0, *ends]):
        rows = end - begin
        lanes = max(1, min(LANES * rows // layout.rows, rows // least, rows // layout.block_rows))
        found += [begin + rows * lane // lanes for lane in range(1, lanes + 1)]
    return found


class StoredOrder:
    """The order of evaluation: one pass over the rows of ``layout`` as they are stored, on every rank its own share.

    Batches are local: a rank cuts its contiguous share of the rows into batches of at most ``batch_size``.
    """

    def __init__(self, layout: Layout, batch_size: int) -> None:
        self.layout = layout
        self.batch_size = batch_size

    @property
    def largest(self) -> int:
        """The rows of the largest batch."""
        return min(self.batch_size, self.layout.rows)

    def plans(self, rank: int, world: int) -> Iterator[BatchPlan]:
        """What ``rank`` of ``world`` reads, batch by batch; ``consumed`` is the number of the row that follows."""
        mine, read = share(rank, world, self.layout.rows), -1
        for start in range(mine.start, mine.stop, self.batch_size):
            stop = min(start + self.batch_size, mine.stop)
            of_start, of_last = (self.layout.block_of(row) for row in (start, stop - 1))
            yield BatchPlan(
                np.arange(start, stop), list(range(max(of_start, read + 1), of_last + 1)), stop - start, stop
            )
            read = of_last
