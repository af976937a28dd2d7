"""How much larger a variant's RMSE is than FP32's, with confidence limits, from the same rows.

Paired bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13): rows are drawn with
replacement, with the errors of both models on them, and the limits are percentiles of the ratio. It is blind to errors
that no row shows: a variant that is wrong on rare inputs needs those inputs among the rows.
"""

from __future__ import annotations

import numpy as np

DRAWS = 2000
#: Rows that are drawn at a time, to bound the memory.
AT_A_TIME = 4_000_000
#: Rows beyond which draws are saved: the ratio of so many is as good as normal, and fewer draws find its limits.
MANY = 200_000
FEWEST_DRAWS = 400


def ratios(fp32: np.ndarray, variant: np.ndarray, seed: int = 0) -> np.ndarray:
    """The ratio of the RMSEs minus one, in each draw. Both are squared errors ``[rows]``, float64."""
    rows = len(fp32)
    draws = DRAWS if rows <= MANY else max(FEWEST_DRAWS, DRAWS * MANY // rows)
    generator, found = np.random.default_rng(seed), []
    step = max(1, AT_A_TIME // rows)
    for start in range(0, draws, step):
        drawn = generator.integers(0, rows, (min(step, draws - start), rows))
        found.append(np.sqrt(variant[drawn].sum(axis=1) / np.maximum(fp32[drawn].sum(axis=1), 1e-300)) - 1)
    return np.concatenate(found)


def limits(fp32: np.ndarray, variant: np.ndarray, error: float) -> tuple[float, float]:
    """The lower and the upper limit of the relative loss, each missed with probability ``error``."""
    if np.array_equal(fp32, variant):
        return 0.0, 0.0
    low, high = np.quantile(ratios(fp32, variant), (error, 1 - error))
    return float(low), float(high)
