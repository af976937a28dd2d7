"""The limit of a mean of figures of which few are much larger than the others, such as losses by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def effective_rows(figures: np.ndarray) -> np.ndarray:
    """How many of ``[..., rows]`` make the sum of all sizes; 0 if all are 0 (Kish's effective size, "Survey Sampling",
    1965): as many as there are if they are alike, 1 if one is much larger than all others together."""
    size = np.abs(figures)
    size = size / np.maximum(size.max(axis=-1, keepdims=True), 1e-300)
    return np.asarray(size.sum(axis=-1) ** 2 / np.maximum((size**2).sum(axis=-1), 1e-300))


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
