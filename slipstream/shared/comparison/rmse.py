"""RMSE loss of a variant against FP32, with confidence limits from paired rows.

A ratio r of the two mean squared errors is possible if the mean of ``after - r * before`` (squared errors), which is 0
at the true ratio, is not significantly below 0 (Fieller, "Some Problems in Interval Estimation", Journal of the Royal
Statistical Society B 16, 1954). The test is Johnson's skewness-corrected t
(:mod:`slipstream.shared.comparison.skewed_mean`).

If few rows make most of the difference, Student's quantile has half as many degrees of freedom as such rows. Below
``FEW`` such rows no distribution is trusted. The limit then assumes an error of ``UNSEEN`` times the largest observed
error on Clopper and Pearson's exact upper limit of the share of rows that differ.

In simulations (``tests/comparison/test_rmse.py``) a nominal 5 % limit lies below the truth in at most 6 % of the draws;
the percentile bootstrap's in up to 98 %. Limits cannot cover unobserved rows: a variant passes even if it errs by more
than ``UNSEEN`` times the largest observed error on rows too rare to be in the sample.
"""

from __future__ import annotations

import numpy as np

from slipstream.shared.comparison import skewed_mean
from slipstream.shared.comparison.skewed_mean import effective_rows
from slipstream.shared.models import metrics

#: Minimum effective number of rows that differ for trusting their distribution.
FEW = 20
UNSEEN = 2.0
#: Fraction of ``error`` for which Student's limit is computed, because with heavy tails it errs more often than that.
ASKED = 0.8
#: Bisection steps over possible growths; the limit has a relative precision of 1e-9 or better.
HALVINGS = 60
#: Largest relative growth that is reported.
MOST = 1e4


def relative_rmse_growth(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the relative growth of the RMSE; both are squared errors ``[..., rows]``, float64."""
    then, now = before.sum(axis=-1), after.sum(axis=-1)
    ratio = np.divide(now, then, where=then > 0, out=np.where(now > 0, np.inf, 1.0))
    return np.minimum(np.sqrt(ratio) - 1, MOST)


def upper_limit(before: np.ndarray, after: np.ndarray, error: float) -> np.ndarray:
    """Return the upper limit of the true relative growth of the RMSE at level 1 - ``error``.

    Both are squared errors ``[..., rows]``.
    """
    lost = after - before
    unlike = effective_rows(lost)
    limits = growth_of_few(before, after, error), growth_limit(before, lost, unlike, error)
    growth = np.where(unlike < FEW, *limits)
    return np.minimum(np.sqrt(1 + growth) - 1, MOST)


def lower_limit(before: np.ndarray, after: np.ndarray, error: float) -> np.ndarray:
    """Return the lower limit of the true relative growth of the RMSE at level 1 - ``error``."""
    return 1 / np.maximum(1 + upper_limit(after, before, error), 1 / (1 + MOST)) - 1


def growth_limit(before: np.ndarray, lost: np.ndarray, unlike: np.ndarray, error: float) -> np.ndarray:
    """Return the largest possible relative growth of the mean squared error.

    Growth g is possible if the mean of ``lost - g * before`` may be 0. The result exceeds ``MOST`` squared if even the
    mean of ``before`` may be 0. ``unlike`` is the effective number of rows that differ.
    """
    from scipy.stats import t

    rows = before.shape[-1]
    quantile = t.ppf(1 - ASKED * error, np.maximum(unlike / 2 - 1, 1))
    scale = before.mean(axis=-1, keepdims=True)
    scale = np.where(scale > 0, scale, 1.0)
    u, v = lost / scale, before / scale
    mean_u, mean_v = u.mean(axis=-1), v.mean(axis=-1)
    u, v = u - mean_u[..., None], v - mean_v[..., None]
    uu, uv, vv = u * u, u * v, v * v
    # Moments of the difference and of FP32's errors, not of both errors: these agree in many digits, which would
    # cancel.
    second = [each.mean(axis=-1) * rows / max(rows - 1, 1) for each in (uu, uv, vv)]
    third = [each.mean(axis=-1) for each in (uu * u, uu * v, vv * u, vv * v)]

    def possible(growth: np.ndarray) -> np.ndarray:
        spread = np.sqrt(np.maximum(second[0] - 2 * growth * second[1] + growth**2 * second[2], 0))
        cubed = third[0] - 3 * growth * third[1] + 3 * growth**2 * third[2] - growth**3 * third[3]
        skewness = cubed / np.maximum(spread, 1e-100) ** 3
        return skewed_mean.upper_limit(mean_u - growth * mean_v, spread, skewness, rows, quantile) >= 0

    # Maps 0 to almost 1 to growths from the observed one to beyond the largest reported.
    def growth_at(place: np.ndarray) -> np.ndarray:
        return mean_u + place / (1 - place)

    low, high = np.zeros(mean_u.shape), np.full(mean_u.shape, 1 - 1e-9)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        inside = possible(growth_at(middle))
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return growth_at(high)


def growth_of_few(before: np.ndarray, after: np.ndarray, error: float) -> np.ndarray:
    """Return the largest possible growth if fewer than ``FEW`` rows differ, without assuming a distribution."""
    share = metrics.upper_limit(np.count_nonzero(after != before, axis=-1), before.shape[-1], error)
    worst = UNSEEN**2 * np.maximum(before, after).max(axis=-1)
    mean = before.mean(axis=-1)
    return np.divide(share * worst, mean, where=mean > 0, out=np.full(mean.shape, np.inf))
