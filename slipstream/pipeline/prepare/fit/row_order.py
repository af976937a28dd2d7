"""Columns whose values are ordered as the rows are, such as row numbers in a table that was sorted by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: Smallest number of steps between rows for calling a column ordered.
ENOUGH = 20
#: Share of steps in one direction from which a column is ordered; the order restarts where tables were concatenated.
ORDERED = 0.95
#: Share of the first :data:`LOOKED_AT` steps in one direction below which a column is not looked at further.
HOPELESS, LOOKED_AT = 0.75, 64


class RowOrder(NamedTuple):
    """Mergeable counts of the steps between successive values of all columns.

    ``steps`` (int64 ``[columns, 3]``) counts steps up, down and all; ``ends`` (float64 ``[columns, 2]``) are the first
    and last value, NaN without values. ``failed`` columns have fractions or no order.
    """

    steps: np.ndarray
    ends: np.ndarray
    failed: np.ndarray

    @classmethod
    def nothing(cls, columns: int) -> RowOrder:
        return cls(np.zeros((columns, 3), np.int64), np.full((columns, 2), np.nan), np.zeros(columns, bool))

    def then(self, numbers: Sequence[np.ndarray]) -> RowOrder:
        """Return the counts with the next rows, float64 with NaN where missing."""
        more = RowOrder.nothing(len(numbers))
        more.failed[:] = self.failed
        for place in np.flatnonzero(~self.failed).tolist():
            column = numbers[place]
            more.failed[place] = is_hopeless(column[: LOOKED_AT + 1])
            present = column[~np.isnan(column)] if not more.failed[place] else column[:0]
            if len(present):
                more.failed[place] = bool((present != np.floor(present)).any())
                more.steps[place] = steps_of(present)
                more.ends[place] = present[0], present[-1]
        return self.merge(more)

    def merge(self, other: RowOrder) -> RowOrder:
        """Return the counts of these rows followed by the ``other`` ones."""
        (first, last), (after, end) = self.ends.T, other.ends.T
        between = np.stack([last < after, last > after, ~np.isnan(last) & ~np.isnan(after)], axis=1)
        ends = np.stack([np.where(np.isnan(first), after, first), np.where(np.isnan(end), last, end)], axis=1)
        return RowOrder(self.steps + other.steps + between, ends, self.failed | other.failed)

    def ordered(self) -> np.ndarray:
        """Return which columns are whole, nearly unique and ordered with the rows (bool ``[columns]``)."""
        most, steps = self.steps[:, :2].max(axis=1), self.steps[:, 2]
        return ~self.failed & (steps >= ENOUGH) & (most >= ORDERED * steps)


def is_hopeless(head: np.ndarray) -> bool:
    up, down, steps = steps_of(head[~np.isnan(head)])
    return steps == LOOKED_AT and max(up, down) < HOPELESS * steps


def steps_of(present: np.ndarray) -> tuple[int, int, int]:
    before, after = present[:-1], present[1:]
    return int(np.count_nonzero(after > before)), int(np.count_nonzero(after < before)), len(before)
