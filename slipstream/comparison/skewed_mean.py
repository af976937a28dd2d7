"""The limit of a mean of figures of which few are much larger than the others, such as losses by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def upper_limit(mean: ArrayLike, spread: ArrayLike, skewness: ArrayLike, rows: int, quantile: ArrayLike) -> np.ndarray:
    """What the true mean does not exceed, if ``quantile`` is Student's for the wanted level.

    Student's limit with Johnson's correction ("Modified t Tests and Confidence Intervals for Asymmetrical Populations",
    Journal of the American Statistical Association 73, 1978; Hall, "On the Removal of Skewness by Transformation",
    Journal of the Royal Statistical Society B 54, 1992, derives the same term). A skewness below 0, which would make
    the limit lower, is not believed: a sample seldom shows the whole of it.
    """
    mean, spread, skewness, quantile = map(np.asarray, (mean, spread, skewness, quantile))
    corrected = quantile + np.maximum(skewness, 0.0) * (1 + 2 * quantile**2) / (6 * np.sqrt(rows))
    return np.asarray(mean + corrected * spread / np.sqrt(rows))
