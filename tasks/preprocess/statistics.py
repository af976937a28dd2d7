"""What is counted while the rows go by: moments per split, value counts of the training rows, and a fair sample.

Every partial result belongs to one unit and is merged in the order of the units, so that no figure depends on how
many processes did the work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.preprocess.values import clean, codes_of

#: Distinct texts that are counted exactly; beyond, rare ones are dropped on the way.
COUNTED = 100_000
#: Texts longer than this on average are prose, of which no vocabulary is made.
PROSE_BYTES = 200


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared deviations, extremes: mergeable (Chan, Golub, LeVeque, 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, numbers: np.ndarray) -> Moments:
        """Of finite float64 values; NaN, for missing, is passed over."""
        total = np.add.reduce(numbers)
        if np.isnan(total):
            numbers = numbers[~np.isnan(numbers)]
            total = np.add.reduce(numbers)
        if len(numbers) == 0:
            return cls()
        mean = float(total / len(numbers))
        deviations = numbers - mean
        deviations *= deviations
        squares = float(np.add.reduce(deviations))
        return cls(len(numbers), mean, squares, float(numbers.min()), float(numbers.max()))

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        squares = self.squares + other.squares + delta * delta * (self.count * (other.count / count))
        return Moments(count, mean, squares, min(self.low, other.low), max(self.high, other.high))

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass
class Counts:
    """How often each text occurs.

    Beyond ``COUNTED`` distinct texts the rarest are dropped whenever twice as many are held: lossy counting
    (Manku and Motwani, 2002), which keeps every text that is frequent enough for a vocabulary.
    """

    of: dict[str, int] = field(default_factory=dict)
    pruned: bool = False

    def add(self, texts: dict[str, int]) -> None:
        for text, count in texts.items():
            self.of[text] = self.of.get(text, 0) + count
        while len(self.of) > 2 * COUNTED:
            floor = min(self.of.values())
            self.of = {text: count for text, count in self.of.items() if count > floor}
            self.pruned = True

    def ranked(self) -> list[tuple[str, int]]:
        """Most frequent first, equals by name."""
        return sorted(self.of.items(), key=lambda item: (-item[1], item[0]))


@dataclass
class CodeCounts:
    """How often each text of a ``dictionary`` occurs, ``by_code``: int64 ``[groups, texts + 1]``, the last missing."""

    dictionary: pa.Array
    by_code: np.ndarray

    @classmethod
    def nothing(cls, dictionary: pa.Array, groups: int) -> CodeCounts:
        return cls(dictionary, np.zeros((groups, len(dictionary) + 1), np.int64))

    def add(self, texts: pa.DictionaryArray, groups: list[np.ndarray]) -> None:
        """Count texts of this dictionary; ``groups`` are the rows of each group."""
        codes = codes_of(texts)
        for counted, rows in zip(self.by_code, groups, strict=True):
            counted += np.bincount(codes.take(rows), minlength=len(counted))

    @property
    def prose(self) -> bool:
        """Whether the texts are too long for categories."""
        sizes = pc.fill_null(pc.binary_length(self.dictionary), 0).to_numpy(zero_copy_only=False)
        return bool(sizes @ self.by_code[:, :-1].sum(axis=0) > PROSE_BYTES * max(1, self.by_code.sum()))

    def named(self, missing: list[str]) -> list[dict[str, int]]:
        """For each group, how often each cleaned text occurs."""
        names = clean(self.dictionary.cast(pa.string()), missing).to_pylist()
        found = []
        for counted in self.by_code.tolist():
            counts: dict[str, int] = {}
            for name, count in zip(names, counted, strict=False):
                if count and name is not None:
                    counts[name] = counts.get(name, 0) + count
            found.append(counts)
        return found
