"""Counts of what given splits share: equal rows, ids and groups, and training times after those of test rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slipstream.pipeline.prepare.fit.splits import TEST, TRAIN, VALIDATION
from slipstream.shared.source.columns.identity import MISSING, splitmix64


@dataclass
class SplitOverlap:
    """Splits of rows, with hashes of their contents, ids and groups, and their times, one array per batch.

    ``times`` are float64 ``[rows, columns of times]``; ``names`` are these columns.
    """

    splits: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    groups: list[np.ndarray] = field(default_factory=list)
    times: list[np.ndarray] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def merge(self, other: SplitOverlap) -> None:
        for name in ("splits", "rows", "ids", "groups", "times"):
            getattr(self, name).extend(getattr(other, name))
        self.names = self.names or other.names

    def held_out(self, earlier: str = "0") -> str:
        """Return a digest of the contents of test rows in any order, added to that of ``earlier`` rows."""
        parts = [hashes[splits == TEST] for hashes, splits in zip(self.rows, self.splits, strict=True)]
        added = splitmix64(np.concatenate([np.empty(0, np.uint64), *parts])).sum(dtype=np.uint64)
        return f"{(int(earlier, 16) + int(added)) % 2**64:016x}"

    def warnings(self) -> list[str]:
        """Return a warning for everything that the splits share."""
        if not self.splits:
            return []
        splits = np.concatenate(self.splits)
        found = [equal_rows(splits, np.concatenate(self.rows))]
        for parts, noun in ((self.ids, "ids"), (self.groups, "groups")):
            if parts:
                shared = shared_values(splits, np.concatenate(parts))
                found.append(f"{shared:,} {noun} occur in more than one given split" if shared else "")
        for name, seconds in zip(self.names, np.concatenate(self.times).T, strict=True):
            tested = seconds[(splits == TEST) & np.isfinite(seconds)]
            later = int(np.count_nonzero(seconds[splits == TRAIN] > tested.min())) if len(tested) else 0
            found.append(f"column {name!r}: {later:,} training rows are later than the first test row" if later else "")
        return [f"data.split: {text}" for text in found if text]


def equal_rows(splits: np.ndarray, hashes: np.ndarray) -> str:
    """Return how many held-out rows equal a training row, or a test row a validation row; "" if none."""
    train, validation, test = (hashes[splits == number] for number in (TRAIN, VALIDATION, TEST))
    count = int(np.isin(validation, train).sum() + np.isin(test, np.concatenate([train, validation])).sum())
    return f"{count:,} held-out rows equal a row of another given split" if count else ""


def shared_values(splits: np.ndarray, hashes: np.ndarray) -> int:
    """Return the number of values, other than missing ones, that occur in several splits."""
    there = hashes != MISSING
    pairs = np.unique(np.stack([hashes[there], splits[there].astype(np.uint64)]), axis=1)
    _, occurrences = np.unique(pairs[0], return_counts=True)
    return int(np.count_nonzero(occurrences > 1))
