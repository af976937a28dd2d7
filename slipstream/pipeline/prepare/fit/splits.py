"""Splits of the rows, and what given splits share.

Rows are assigned by a stable hash of id or content, so that adding rows never moves existing rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.source.columnar import IDENTITY, Unit
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import (
    MISSING,
    combine_hashes,
    hash_identities,
    hash_rows,
    hash_values,
    splitmix64,
)
from slipstream.shared.source.columns.number_formats import NumberFormat
from slipstream.shared.source.config import DataConfig, SplitConfig
from slipstream.shared.source.given_splits import splits_of_column

#: Times in seconds since 1970 at which the validation and test splits start.
Cuts = tuple[float, float]

TRAIN, VALIDATION, TEST = 0, 1, 2
#: Deviation of a split's share, as a share of the configured one and in standard deviations, from which it is reported.
FAR, CHANCE = 0.2, 4.0


@dataclass(frozen=True)
class SplitRule:
    """Rule for the splits of a table; ``content`` are the columns whose hash decides if nothing else does."""

    config: DataConfig
    content: list[str]
    cuts: Cuts | None
    #: Splits to draw from the training rows of given splits; None if the data name no splits.
    drawn: list[int] | None = None

    def assign(
        self, original: pa.RecordBatch, batch: pa.RecordBatch, lines: np.ndarray, unit: Unit
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the split of every row, and how many of ``data.group`` and ``data.id`` it lacks (both ``[rows]``).

        The time decides if there are cuts, else the group, the id or the content: the first that a row has.
        ``original`` holds the rows as stored, ``batch`` the same rows in their declared types.
        """
        config, rows = self.config, batch.num_rows
        hashes, gaps, left = np.zeros(rows, np.uint64), np.zeros(rows, np.int64), np.arange(rows)
        if self.cuts:
            return assign_by_time(value_types.as_numbers(batch.column(config.time)), self.cuts), gaps
        if self.drawn is not None:
            given = splits_of_column(original.column(config.split.named_by))
            if not self.drawn:
                return given, gaps
        for name in config.identities:
            own = self._identities(name, original, lines, unit)[left]
            hashes[left] = combine_hashes([(name, own)], len(own))
            left = left[own == MISSING]
            gaps[left] += 1
            if not len(left):
                break
        if len(left):
            of_rows = batch if len(left) == rows else batch.take(pa.array(left))
            content = [(name, of_rows.column(name)) for name in self.content]
            hashes[left] = hash_rows(content, len(left), NumberFormat.of(config))
        return assign_splits(hashes, config.split) if self.drawn is None else draw_missing(
            given, hashes, self.drawn, config.split
        ), gaps

    def contents(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return the hashes of whole rows without their id, uint64 ``[rows]``."""
        columns = [(name, batch.column(name)) for name in self.content if name != self.config.id]
        return hash_rows(columns, batch.num_rows, NumberFormat.of(self.config))

    def identities(self, name: str, original: pa.RecordBatch, lines: np.ndarray, unit: Unit) -> np.ndarray:
        return self._identities(name, original, lines, unit)

    def _identities(self, name: str, original: pa.RecordBatch, lines: np.ndarray, unit: Unit) -> np.ndarray:
        """Return the hashes of an id or group: stored ones, or of the directory's name or the values."""
        number_format = NumberFormat.of(self.config)
        if name in unit.partition:
            text = pa.array([unit.partition[name]], pa.string())
            return np.repeat(hash_values(text, number_format, exact=True), original.num_rows)
        if IDENTITY + name in original.schema.names:
            return original.column(IDENTITY + name).to_numpy()
        return hash_identities(original.column(name), number_format, name, unit.file, lines)

    def warnings(self, rows: Sequence[int], gaps: Sequence[int], sample: pa.Table) -> list[str]:
        """Return warnings of rows without group or id, and of splits with too many or few ``rows``.

        ``gaps`` is :attr:`.ScanResult.gaps`. The number of groups in the ``sample`` tells what chance can cause.
        """
        split, total, names = self.config.split, sum(rows), [repr(name) for name in self.config.identities]
        warnings = [
            f"data: {count:,} of {total:,} rows have no value in {' and '.join(names[: lacks + 1])}; they are split by "
            f"{' '.join(names[lacks + 1 :]) or 'their other values'}"
            for lacks, count in enumerate(gaps)
            if count
        ]
        shares = (1 - split.validation - split.test, split.validation, split.test)
        wrong = [abs(count / max(total, 1) - share) for count, share in zip(rows, shares, strict=True)]
        if (
            split.test_from
            or split.is_given
            or all(off <= FAR * share for off, share in zip(wrong, shares, strict=True))
        ):
            return warnings
        groups = self._groups(sample)
        return warnings + [
            f"data.split: {name} has {count / total:.1%} of the rows, but {share:.1%} were asked for: too many rows "
            "share one value of what decides the split; look for a value that stands for none"
            for name, count, share, off in zip(SPLITS, rows, shares, wrong, strict=True)
            if off > max(FAR * share, CHANCE * math.sqrt(share * (1 - share) / groups))
        ]

    def _groups(self, sample: pa.Table) -> int:
        """Return the number of different values that decide a split in the sample, at least 1."""
        if self.cuts:
            return max(1, len(np.unique(sample[self.config.time].to_numpy())))
        columns = {name: sample[name].combine_chunks() for name in {*self.content, *self.config.identities}}
        if any(pa.types.is_null(columns[name].type) for name in self.config.identities):
            return 1  # the sample has no bytes
        hashes = hash_rows([(name, columns[name]) for name in self.content], sample.num_rows)
        for name in reversed(self.config.identities):
            own = hash_values(columns[name], exact=True)
            hashes = np.where(own == MISSING, hashes, own)
        return max(1, len(np.unique(hashes)))


def assign_splits(hashes: np.ndarray, config: SplitConfig) -> np.ndarray:
    """Return the split of every row from its uint64 hash; equal hashes get the same split.

    The result is uint8 ``[rows]``, an index into ``SPLITS``.
    """
    return held_out_by(hashes, config.validation, config.test, config.seed)


def held_out_by(hashes: np.ndarray, validation: float, test: float, seed: int) -> np.ndarray:
    start = splitmix64(np.array([seed], np.uint64))
    share = (splitmix64(hashes ^ start) >> np.uint64(11)) * 2.0**-53
    held_out = np.where(share < test, TEST, VALIDATION)
    return np.where(share < test + validation, held_out, TRAIN).astype(np.uint8)


def draw_missing(given: np.ndarray, hashes: np.ndarray, drawn: Sequence[int], config: SplitConfig) -> np.ndarray:
    """Return the given splits, with the splits ``drawn`` taken from the training rows by their hashes."""
    shares = (config.validation if VALIDATION in drawn else 0.0, config.test if TEST in drawn else 0.0)
    return np.where(given == TRAIN, held_out_by(hashes, *shares, config.seed), given)


def assign_by_time(seconds: np.ndarray, cuts: Cuts) -> np.ndarray:
    """Return the split (uint8 ``[rows]``) of float64 times: training before the first cut, test from the second."""
    return np.searchsorted(cuts, seconds, side="right").astype(np.uint8)


def find_cuts(seconds: np.ndarray, config: SplitConfig) -> Cuts:
    """Return the cuts that hold out the configured shares of the latest rows; equal times get the same split."""
    shares = [1 - config.test - config.validation, 1 - config.test]
    validation, test = np.quantile(seconds, shares, method="higher")
    return float(validation), float(test)


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
