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

from tasks.preprocess.values import clean

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
        """Of float64 values without NaN or infinity."""
        if len(numbers) == 0:
            return cls()
        mean = float(numbers.mean())
        deviations = numbers - mean
        deviations *= deviations
        return cls(len(numbers), mean, float(deviations.sum()), float(numbers.min()), float(numbers.max()))

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


def count_texts(column: pa.Array, missing: list[str]) -> dict[str, int]:
    """How often each cleaned text occurs in one column."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    found = pc.value_counts(column).flatten()
    names = clean(found[0].cast(pa.string()), missing).to_pylist()
    counts: dict[str, int] = {}
    for name, count in zip(names, found[1].to_pylist(), strict=True):
        if name is not None:
            counts[name] = counts.get(name, 0) + count
    return counts


def is_prose(column: pa.Array) -> bool:
    total = pc.sum(pc.binary_length(column if not pa.types.is_dictionary(column.type) else column.dictionary)).as_py()
    return (total or 0) > PROSE_BYTES * max(1, len(column))
