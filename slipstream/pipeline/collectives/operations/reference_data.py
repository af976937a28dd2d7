"""Reference data that proves a result: the inputs and expected outputs of every rank.

Values depend on rank and position, because a constant would hide misplaced data. They are integers that the data type
represents exactly, even a bfloat16 sum (8 bits of mantissa) over up to 32 ranks. For more ranks than the type can add
exactly, results are compared with the tolerance of nccl-tests. Data are generated in chunks to save memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}
#: Largest n for which the data type represents all integers up to n.
EXACT = {"float32": 1 << 24, "bfloat16": 1 << 8, "float16": 1 << 11, "int32": 1 << 31, "int64": 1 << 53}
#: Relative tolerance of nccl-tests, `deltaMaxValue` in src/common.cu (until 2.12).
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "int32": 0.0, "int64": 0.0}
#: A rank's values repeat every ``PERIOD`` elements, rotated by ``TURN`` each time. Only data misplaced by a multiple of
#: the square of this prime would go unnoticed.
PERIOD, TURN = 1021, 389
FEWEST_LEVELS, MOST_LEVELS = 8, 1 << 15
#: Value of all outputs before a checked run, so that an earlier result cannot pass as the new one.
POISON = -1
PIECE = 1 << 20


@dataclass(frozen=True)
class ReferenceData:
    """Inputs and expected outputs of all ranks in one case.

    ``reduction`` is "" for operations that only move data.
    """

    dtype: str
    world: int
    reduction: str = ""

    @property
    def levels(self) -> int:
        """Number of distinct input values, the integers from 0."""
        ranks = self.world if self.reduction in ("sum", "avg") else 1
        return int(np.clip(EXACT[self.dtype] // ranks, FEWEST_LEVELS, min(MOST_LEVELS, EXACT[self.dtype])))

    @property
    def tolerance(self) -> float:
        """Allowed relative error; 0 if results are exact.

        An average is exact only over a power of two ranks.
        """
        exact = self.reduction not in ("sum", "avg") or self.levels * self.world <= EXACT[self.dtype]
        exact &= self.reduction != "avg" or self.world & (self.world - 1) == 0
        return 0.0 if exact else TOLERANCE[self.dtype]

    def sent(self, rank: int, start: int, count: int) -> Tensor:
        """Return ``count`` inputs of ``rank`` from position ``start`` on: ``[count]`` on the CPU."""
        return repeat_period(random_levels(rank, self.levels), start, count, self.dtype)

    def reduced(self, start: int, count: int) -> Tensor:
        """Return ``count`` reduced inputs of all ranks from position ``start`` on: ``[count]`` on the CPU."""
        return repeat_period(reduced_row(self.world, self.levels, self.reduction, self.dtype), start, count, self.dtype)

    def first_wrong(self, found: Tensor, expected: Tensor) -> int | None:
        """Return the first index at which ``found`` differs from ``expected``; None if none does."""
        if self.tolerance == 0:
            wrong = found != expected
        else:
            wanted = expected.double()
            # All comparisons with NaN are false, so the condition is negated.
            wrong = ~((found.double() - wanted).abs() <= self.tolerance * wanted.abs())
        return int(torch.nonzero(wrong)[0]) if bool(wrong.any()) else None


@cache
def random_levels(rank: int, levels: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(rank)).integers(0, levels, PERIOD)


@cache
def reduced_row(world: int, levels: int, reduction: str, dtype: str) -> np.ndarray:
    rows = [random_levels(rank, levels) for rank in range(world)]
    if reduction == "max":
        return np.max(rows, axis=0)
    total = np.sum(rows, axis=0)
    if reduction != "avg":
        return total
    return total // world if dtype.startswith("int") else total / world


def repeat_period(values: np.ndarray, start: int, count: int, dtype: str) -> Tensor:
    """Return elements ``start`` to ``start + count`` of the sequence whose first period is ``values``."""
    first, offset = divmod(start, PERIOD)
    rows = -(-(offset + count) // PERIOD)
    # Row i of the periods is the first rotated by i times TURN: a window of the values, repeated often enough.
    turned = np.roll(values, -(first * TURN % PERIOD))
    repeats = (rows * TURN) // PERIOD + 2
    stretch = torch.from_numpy(turned).to(DTYPES[dtype]).repeat(repeats)
    return stretch.as_strided((rows, PERIOD), (TURN, 1)).reshape(-1)[offset : offset + count]


def chunk_ranges(count: int) -> Iterator[tuple[int, int]]:
    """Yield (start, count) of chunks of at most ``PIECE`` elements."""
    for start in range(0, count, PIECE):
        yield start, min(PIECE, count - start)
