"""Loss of token accuracy of a variant against FP32, with confidence limits from paired rows of tokens.

Rows are independent, tokens within a row are not. So each row gives one value, its share of lost tokens. Student's
distribution of their mean gives the limits (the cluster-robust interval; Cameron and Miller, "A Practitioner's Guide to
Cluster-Robust Inference", 2015, section II), corrected for rows that lose much more than most
(:mod:`slipstream.shared.comparison.skewed_mean`).

If fewer than ``FEW`` rows make most of the loss, Student's limit is unreliable. The limit is then at least Clopper and
Pearson's exact limit of the share of rows with a loss, times the largest loss of a row (1 if none was observed). If at
least ``FEW`` rows gain tokens, the lower limit of the gain is subtracted; both limits then get half of the error.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.shared.comparison import skewed_mean
from slipstream.shared.comparison.skewed_mean import effective_rows
from slipstream.shared.models import metrics

FEW = 30


def lost_by_row(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the share of tokens lost less tokens gained by row; both arguments are bool ``[rows, length]``."""
    return (before.astype(np.float64) - after).mean(axis=1)


def upper_limit(lost: np.ndarray, error: float) -> float:
    """Return the upper limit of the true loss, as a share of all tokens, at level 1 - ``error``."""
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
        few = float(metrics.upper_limit(worse, rows, half)) * worst
        if half < error:
            few -= max(0.0, gained.mean() - t.ppf(1 - half, rows - 1) * gained.std(ddof=1) / math.sqrt(rows))
        limit = max(limit, few)
    return float(min(limit, 1.0))


def lower_limit(lost: np.ndarray, error: float) -> float:
    return -upper_limit(-lost, error)


def rows_enough(lost: np.ndarray, most: float, error: float) -> int | None:
    """Return about how many similar rows would show a loss below ``most``.

    None if the observed loss is not below ``most``.
    """
    from scipy.stats import norm

    if lost.mean() >= most:
        return None
    if not lost.any():
        return math.ceil(math.log(error) / math.log(1 - most)) if most < 1 else 1
    return max(1, math.ceil((norm.ppf(1 - error) * lost.std() / (most - lost.mean())) ** 2))
