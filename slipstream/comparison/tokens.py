"""How much accuracy over tokens a variant loses against FP32, with confidence limits, from the same rows of tokens.

The tokens of a row are no independent evidence, the rows are: each gives one figure, the share of its tokens that were
lost. Student's distribution of their mean gives the limits (the cluster-robust interval; Cameron and Miller, "A
Practitioner's Guide to Cluster-Robust Inference", 2015, section II), corrected for rows that lose much more than most
(:mod:`slipstream.comparison.skewed_mean`). It does not reach far: where fewer than ``FEW`` rows make most of the loss,
the limit is at least Clopper and Pearson's exact one of the share of rows that lose anything, times the most that one
of them lost, or all of it if none was seen. Where ``FEW`` rows gain something, the lower limit of the gain is set
against that, each of the two with half of the error.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.comparison import skewed_mean
from slipstream.comparison.skewed_mean import effective_rows
from slipstream.models import shares

FEW = 30


def lost_by_row(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The share of each row's tokens that were right before and no more, less those gained; both are bool
    ``[rows, length]``."""
    return (before.astype(np.float64) - after).mean(axis=1)


def upper_limit(lost: np.ndarray, error: float) -> float:
    """The share of all tokens that the true loss does not exceed, with probability 1 - ``error``."""
    from scipy.stats import t

    rows = len(lost)
    if rows < 2:
        return 1.0
    quantile, spread = t.ppf(1 - error, rows - 1), lost.std(ddof=1)
    skewness = np.mean(((lost - lost.mean()) / spread) ** 3) if spread else 0.0
    limit = float(skewed_mean.upper_limit(lost.mean(), spread, skewness, rows, quantile))
    losses, gained = np.maximum(lost, 0.0), np.maximum(-lost, 0.0)
    worse = int(np.count_nonzero(losses))
    if effective_rows(losses) < min(FEW, rows):
        worst = losses.max() if worse else 1.0
        half = error / 2 if np.count_nonzero(gained) >= FEW else error
        few = float(shares.upper_limit(worse, rows, half)) * worst
        if half < error:
            few -= max(0.0, gained.mean() - t.ppf(1 - half, rows - 1) * gained.std(ddof=1) / math.sqrt(rows))
        limit = max(limit, few)
    return float(min(limit, 1.0))


def lower_limit(lost: np.ndarray, error: float) -> float:
    return -upper_limit(-lost, error)


def rows_enough(lost: np.ndarray, most: float, error: float) -> int | None:
    """About how many rows would show a loss below ``most``, if they are like these; None if it is not below it here."""
    from scipy.stats import norm

    if lost.mean() >= most:
        return None
    if not lost.any():
        return math.ceil(math.log(error) / math.log(1 - most))
    return math.ceil((norm.ppf(1 - error) * lost.std() / (most - lost.mean())) ** 2)
