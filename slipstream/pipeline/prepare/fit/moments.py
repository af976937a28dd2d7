"""Statistics of the first pass: moments by split, value counts of the training rows and a uniform sample.

Statistics of units are merged in unit order, so results do not depend on the number of processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.source.columns.value_types import dictionary_codes
from slipstream.shared.source.memory import COUNTED

#: Mean length in bytes above which texts are prose and get no vocabulary.
PROSE_BYTES = 200
#: Length in bytes at which longer texts are counted, so that a single long text does not turn categories into prose.
COUNTED_BYTES = 10 * PROSE_BYTES
#: Number of numeric columns measured at once, few enough for the CPU cache.
COLUMNS_AT_ONCE = 16


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations and extremes of one column in one split."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class ColumnMoments(NamedTuple):
    """Mergeable moments of all columns by group (split), each float64 ``[columns, groups]``.

    Fields are count, mean, sum of squared deviations, minimum and maximum. Merging follows Chan, Golub and LeVeque
    (1979). A group without values has count 0, minimum inf and maximum -inf.
    """

    counts: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def nothing(cls, columns: int, groups: int) -> ColumnMoments:
        zeros, beyond = np.zeros((columns, groups)), np.full((columns, groups), math.inf)
        return cls(zeros, zeros, zeros, beyond, -beyond)

    @property
    def largest(self) -> float:
        """Largest absolute value of all columns, at least 0."""
        return float(max(self.high.max(initial=0), -self.low.min(initial=0)))

    def merge(self, other: ColumnMoments) -> ColumnMoments:
        total = self.counts + other.counts
        share = other.counts / np.maximum(total, 1)
        delta = other.mean - self.mean
        return ColumnMoments(
            total,
            self.mean + delta * share,
            self.squares + other.squares + delta * delta * (self.counts * share),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    def of(self, column: int) -> list[Moments]:
        return [Moments(int(count), *rest) for count, *rest in zip(*(f[column].tolist() for f in self), strict=True)]


def column_moments(numbers: list[np.ndarray], groups: list[np.ndarray]) -> ColumnMoments:
    """Return the moments of float64 columns without NaN; ``groups`` holds the row indices of every group."""
    figures = ColumnMoments(*(figure.copy() for figure in ColumnMoments.nothing(len(numbers), len(groups))))
    filled = [group for group, rows in enumerate(groups) if len(rows)]
    if not filled:
        return figures
    chosen = np.concatenate(groups)
    lengths = np.array([len(groups[group]) for group in filled])
    matrix = np.empty((COLUMNS_AT_ONCE, len(chosen)))
    for start in range(0, len(numbers), COLUMNS_AT_ONCE):
        part = numbers[start : start + COLUMNS_AT_ONCE]
        for column, row in zip(part, matrix, strict=False):
            column.take(chosen, out=row, mode="clip")
        for figure, here in zip(figures, measure_moments(matrix[: len(part)], lengths), strict=True):
            figure[start : start + len(part), filled] = here
    return figures


def measure_moments(matrix: np.ndarray, lengths: np.ndarray) -> ColumnMoments:
    """Return the moments of ``matrix`` (float64 ``[columns, rows]``), which is overwritten.

    Groups are consecutive rows, of the ``lengths``, all above 0. With infinite values only the extremes are right.
    """
    starts = np.cumsum(lengths) - lengths
    totals = np.add.reduceat(matrix, starts, axis=1)
    count = np.broadcast_to(lengths, totals.shape).astype(np.float64)
    low, high = (reduce.reduceat(matrix, starts, axis=1) for reduce in (np.minimum, np.maximum))
    gaps = np.flatnonzero(np.isnan(totals).any(axis=1))
    if len(gaps):
        absent = np.isnan(matrix[gaps])
        count[gaps] -= np.add.reduceat(absent, starts, axis=1, dtype=np.float64)
        totals[gaps] = np.add.reduceat(np.where(absent, 0.0, matrix[gaps]), starts, axis=1)
        low[gaps] = np.minimum.reduceat(np.where(absent, math.inf, matrix[gaps]), starts, axis=1)
        high[gaps] = np.maximum.reduceat(np.where(absent, -math.inf, matrix[gaps]), starts, axis=1)
    mean = totals / np.maximum(count, 1)
    for group, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        matrix[:, start : start + length] -= mean[:, group, None]
    matrix *= matrix
    if len(gaps):
        matrix[gaps] = np.where(absent, 0.0, matrix[gaps])
    return ColumnMoments(count, mean, np.add.reduceat(matrix, starts, axis=1), low, high)


@dataclass
class TextOccurrences:
    """Number of occurrences of every text.

    When ``2 * limit`` distinct texts are held, the rarest are dropped: lossy counting (Manku and Motwani, 2002), which
    keeps every text that is frequent enough for a vocabulary.
    """

    limit: int = COUNTED
    of: dict[str, int] = field(default_factory=dict)
    pruned: bool = False

    def add(self, texts: dict[str, int]) -> None:
        for text, count in texts.items():
            self.of[text] = self.of.get(text, 0) + count
        while len(self.of) > 2 * self.limit:
            floor = min(self.of.values())
            self.of = {text: count for text, count in self.of.items() if count > floor}
            self.pruned = True

    def ranked(self) -> list[tuple[str, int]]:
        """Return texts and counts, most frequent first, ties by text."""
        return sorted(self.of.items(), key=lambda item: (-item[1], item[0]))


@dataclass
class CodeOccurrences:
    """Number of occurrences of the texts of one ``dictionary``.

    ``by_code`` is int64 ``[groups, texts + 1]``; the last column counts missing values.
    """

    dictionary: pa.Array
    by_code: np.ndarray

    @classmethod
    def nothing(cls, dictionary: pa.Array, groups: int) -> CodeOccurrences:
        return cls(dictionary, np.zeros((groups, len(dictionary) + 1), np.int64))

    def add(self, texts: pa.DictionaryArray, groups: list[np.ndarray]) -> None:
        """Count texts that are encoded by this dictionary; ``groups`` holds the row indices of every group."""
        codes = dictionary_codes(texts)
        for counted, rows in zip(self.by_code, groups, strict=True):
            counted += np.bincount(codes.take(rows), minlength=len(counted))

    @property
    def prose(self) -> bool:
        """True if the texts are too long on average for categories."""
        sizes = pc.fill_null(pc.binary_length(self.dictionary), 0).to_numpy(zero_copy_only=False)
        sizes = np.minimum(sizes, COUNTED_BYTES)
        return bool(sizes @ self.by_code[:, :-1].sum(axis=0) > PROSE_BYTES * max(1, self.by_code.sum()))

    def present(self, names: pa.Array) -> list[int]:
        """Return the number of non-missing values by group; ``names`` are the dictionary's texts after cleaning."""
        return (self.by_code[:, :-1] @ names.is_valid().to_numpy(zero_copy_only=False)).tolist()

    def named(self, names: pa.Array, group: int) -> dict[str, int]:
        """Return the number of occurrences in a group by text; ``names`` are the dictionary's texts after cleaning."""
        counted = self.by_code[group, :-1]
        seen = np.flatnonzero((counted > 0) & names.is_valid().to_numpy(zero_copy_only=False))
        counts: dict[str, int] = {}
        for name, count in zip(names.take(pa.array(seen)).to_pylist(), counted[seen].tolist(), strict=True):
            counts[name] = counts.get(name, 0) + count
        return counts
