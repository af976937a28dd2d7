"""Confidence limit of the mean of skewed figures, such as losses by row."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def effective_rows(figures: np.ndarray) -> np.ndarray:
    """Return the effective number of rows in ``[..., rows]`` (Kish, "Survey Sampling", 1965).

    It is the number of rows if all absolute values are equal, 1 if one dominates, 0 if all are 0.
    """
    size = np.abs(figures)
    size = size / np.maximum(size.max(axis=-1, keepdims=True), 1e-300)
    return np.asarray(size.sum(axis=-1) ** 2 / np.maximum((size**2).sum(axis=-1), 1e-300))


def upper_limit(mean: ArrayLike, spread: ArrayLike, skewness: ArrayLike, rows: int, quantile: ArrayLike) -> np.ndarray:
    """Return the upper limit of the true mean at the level of Student's ``quantile``.

    ``spread`` is the standard deviation. The limit is Student's with Johnson's correction ("Modified t Tests and
    Confidence Intervals for Asymmetrical Populations", Journal of the American Statistical Association 73, 1978; Hall,
    "On the Removal of Skewness by Transformation", Journal of the Royal Statistical Society B 54, 1992, derives the
    same term). A negative skewness would lower the limit and is ignored, because samples seldom show it fully.
    """
    mean, spread, skewness, quantile = map(np.asarray, (mean, spread, skewness, quantile))
    corrected = quantile + np.maximum(skewness, 0.0) * (1 + 2 * quantile**2) / (6 * np.sqrt(rows))
    return np.asarray(mean + corrected * spread / np.sqrt(rows))
