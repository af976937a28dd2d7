"""Exact medians of the training rows, from the pass that encodes them.

A fair sample tells between which two values a median must lie. While rows are encoded, those below are counted and
those strictly between are kept, about two in a hundred; the median is picked from them at the end, one column at a
time. Values that occur often and lie at an end are counted, not kept: a column of few values keeps nothing. Where the
sample misled, the rows are passed over once more with a wider bracket. Which bracket was used changes no median.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import xxhash

from tasks.preprocess.budget import Budget
from tasks.preprocess.columnar import Unit
from tasks.preprocess.split import TRAIN
from tasks.preprocess.survey import SPLIT, Found, Rows, Survey, read_again

#: An end of a bracket is so many standard deviations of rank away from the sample's median: of 15,000 medians one lies
#: outside.
FAR = 4.0
#: How much farther the ends are each time that they were too near.
FARTHER = 4.0


@dataclass(frozen=True)
class Bracket:
    """A median lies between ``low`` and ``high``, or is one of them: values equal to an end are counted where the
    sample has more than one of them, and else there are none."""

    low: float
    high: float
    at_low: bool
    at_high: bool


Brackets = dict[str, Bracket]


def brackets_of(found: Found, survey: Survey, turn: int = 0) -> Brackets:
    """For every column of numbers with values in training rows; none if the sample is the whole table."""
    far = FAR * FARTHER**turn
    sample = found.sample_table()
    if sample.num_rows == sum(found.rows):
        return {}
    train = sample.select([*survey.numeric, SPLIT]).filter(pc.equal(sample[SPLIT], TRAIN))
    return {
        name: bracket(train[name].drop_null().to_numpy(), far)
        for name in survey.numeric
        if found.columns[name].moments[TRAIN].count
    }


def bracket(sample: np.ndarray, far: float) -> Bracket:
    """``far`` standard deviations of rank to both sides of the median of a ``sample`` (float64)."""
    middle, reach = (len(sample) - 1) / 2, far * np.sqrt(len(sample)) / 2
    ranks = [int(np.floor(middle - reach)), int(np.ceil(middle + reach))]
    if ranks[0] < 0:  # and so the other is beyond the end
        return Bracket(-np.inf, np.inf, at_low=False, at_high=False)
    low, high = placed(sample.copy(), ranks)[ranks].tolist()
    at_low, at_high = (bool(np.count_nonzero(sample == end) > 1) for end in (low, high))
    if not at_low:
        low = float(np.nextafter(low, -np.inf))
    if not at_high:
        high = float(np.nextafter(high, np.inf))
    # Where both ends are one value, it is counted once.
    return Bracket(low, high, at_low, at_high and low < high)


def placed(numbers: np.ndarray, ranks: list[int]) -> np.ndarray:
    """The same array, with what has these ranks (rising) in its place. numpy is much faster with one rank at a time."""
    start = 0
    for rank in dict.fromkeys(ranks):
        numbers[start:].partition(rank - start)
        start = rank + 1
    return numbers


@dataclass(frozen=True)
class Kept:
    """What a unit holds of the columns of the brackets, in their order.

    ``counts`` (int64 ``[columns, 3]``): values above the low end, equal to it, equal to the high end. Those inside lie
    in ``file`` (float64), block after block and in each column after column: ``lengths`` (int64 ``[blocks, columns]``).
    """

    file: str
    counts: np.ndarray
    lengths: np.ndarray
    digests: dict[str, str]

    def inside(self) -> list[list[np.ndarray]]:
        """For each column, its pieces: views of the file."""
        lengths = self.lengths.ravel()
        whole = np.memmap(self.file, np.float64, "r") if lengths.any() else np.empty(0)
        pieces = np.split(whole, np.cumsum(lengths)[:-1])
        return [pieces[column :: self.lengths.shape[1]] for column in range(self.lengths.shape[1])]


class Keeper:
    """Counts and keeps the values of one unit, batch by batch."""

    def __init__(self, file: Path, brackets: Brackets, budget: Budget) -> None:
        self._file, self._brackets, self._most = file, brackets, budget.held_values
        self._stream = file.open("wb")
        self._hash = xxhash.xxh3_128()
        self._counts = np.zeros((len(brackets), 3), np.int64)
        self._lengths: list[list[int]] = []
        self._inside: list[list[np.ndarray]] = [[] for _ in brackets]
        self._held = 0

    def add(self, rows: Rows, numbers: dict[str, np.ndarray]) -> None:
        """Take the training rows of a batch; ``numbers`` are its columns, float64 with NaN where missing."""
        chosen = np.zeros(rows.batch.num_rows, bool)
        chosen[rows.keep] = True
        chosen &= rows.splits == TRAIN
        # NaN compares as False.
        above, other = np.empty_like(chosen), np.empty_like(chosen)
        for (name, ends), counts, inside in zip(self._brackets.items(), self._counts, self._inside, strict=True):
            column = numbers[name]
            np.logical_and(np.greater(column, ends.low, out=above), chosen, out=above)
            counts[0] += np.count_nonzero(above)
            if ends.at_low:
                counts[1] += np.count_nonzero(np.logical_and(np.equal(column, ends.low, out=other), chosen, out=other))
            if ends.at_high:
                counts[2] += np.count_nonzero(np.logical_and(np.equal(column, ends.high, out=other), chosen, out=other))
            np.logical_and(above, np.less(column, ends.high, out=other), out=above)
            inside.append(column.compress(above))
            self._held += len(inside[-1])
        if self._held > self._most:
            self._write()

    def _write(self) -> None:
        block = [np.concatenate(pieces) if pieces else np.empty(0) for pieces in self._inside]
        for piece in block:
            self._stream.write(piece.data)
            self._hash.update(piece.data)
        self._lengths.append([len(piece) for piece in block])
        self._inside, self._held = [[] for _ in block], 0

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self._stream.close()

    @property
    def kept(self) -> Kept:
        """What was found, once it is closed."""
        file = str(self._file)
        return Kept(file, self._counts, np.array(self._lengths, np.int64), {file: self._hash.hexdigest()})


@dataclass(frozen=True)
class Keeping:
    """What a worker needs to pass over a unit once more, but for its ``rejected`` rows."""

    survey: Survey
    unit: Unit
    rejected: np.ndarray
    brackets: Brackets
    scratch: Path


def keep_unit(job: Keeping) -> Kept:
    """Runs in a worker process."""
    with Keeper(job.scratch / f"again-{job.unit.first_row:012d}", job.brackets, job.survey.budget) as keeper:
        for rows in read_again(job.survey, job.unit, job.rejected):
            keeper.add(rows, job.survey.numbers(rows.batch))
    return keeper.kept


def medians_of(
    found: Found,
    survey: Survey,
    brackets: Brackets,
    kept: list[Kept],
    scratch: Path,
    again: Callable[[Brackets], list[Kept]],
) -> dict[str, float]:
    """The median of each column of the ``brackets``, as ``numpy.median`` has it.

    ``kept`` is of all units; ``again`` passes over all rows with other brackets, for medians that lie outside of
    theirs. What is too large to be held goes to the file ``scratch``.
    """
    medians: dict[str, float] = {}
    for turn in itertools.count(1):
        inside = [part.inside() for part in kept]
        for place, (name, ends) in enumerate(brackets.items()):
            present = found.columns[name].moments[TRAIN].count
            counts = np.sum([part.counts[place] for part in kept], axis=0)
            pieces = [piece for part in inside for piece in part[place]]
            median = pick(present, ends, counts, pieces, survey.budget.held_values, scratch)
            if median is not None:
                medians[name] = median
        missed = brackets.keys() - medians.keys()
        if not missed:
            break
        brackets = {name: ends for name, ends in brackets_of(found, survey, turn).items() if name in missed}
        kept = again(brackets)
    return medians


def pick(
    count: int, ends: Bracket, counts: np.ndarray, pieces: list[np.ndarray], room: int, scratch: Path
) -> float | None:
    """The median of the ``count`` values of a column, of which ``pieces`` lie in its bracket, with ``counts`` as in
    :class:`Kept`; ``None`` if it is not there. More than ``room`` values are ordered in the file ``scratch``."""
    above, at_low, at_high = counts.tolist()
    length = sum(map(len, pieces))
    first = count - above
    ranks = (count - 1) // 2, count // 2
    if ranks[0] < first - at_low or ranks[1] >= first + length + at_high:
        return None
    inside = np.concatenate(pieces) if length <= room else on_disk(pieces, scratch)
    placed(inside, [rank - first for rank in ranks if first <= rank < first + length])
    low, high = (
        ends.low if rank < first else ends.high if rank >= first + length else float(inside[rank - first])
        for rank in ranks
    )
    return (low + high) / 2


def on_disk(pieces: list[np.ndarray], file: Path) -> np.ndarray:
    """The pieces together, as a view of a file. They are written first: where a full disk is met in a view, the
    process is killed."""
    with file.open("wb") as stream:
        for piece in pieces:
            stream.write(piece.data)
    return np.memmap(file, np.float64, "r+")
