"""Decision between two classes by a threshold on the probability of the second, and metrics of decisions."""

from __future__ import annotations

import math

import numpy as np

from slipstream.shared.artifacts.results.training import ThresholdRule

#: Largest log odds of a threshold that separates rows: its distance from 1 in float64 is exact to 3 %.
LARGEST_LOG_ODDS = 34.0
#: Log odds that no row has.
UNREACHED = 1e9


def log_odds(threshold: float) -> float:
    """Return the log odds of a threshold; beyond ``LARGEST_LOG_ODDS`` they are such that all rows are decided alike."""
    odds = math.log(threshold / (1 - threshold))
    return odds if abs(odds) <= LARGEST_LOG_ODDS else math.copysign(UNREACHED, odds)


def with_threshold(logits: np.ndarray, threshold: float | None) -> np.ndarray:
    """Return logits ``[rows, 2]`` whose largest is the decision; unchanged without a threshold."""
    return logits if threshold is None else logits.astype(np.float64) + np.array([log_odds(threshold), 0.0])


def margins(logits: np.ndarray) -> np.ndarray:
    """Return the log odds of the second class, float64 ``[rows]``, of logits ``[rows, 2]``."""
    return logits[:, 1].astype(np.float64) - logits[:, 0]


def choose_threshold(rule: ThresholdRule, odds: np.ndarray, labels: np.ndarray) -> float:
    """Return the best threshold for rows with the log odds ``odds`` and ``labels`` (0 or 1), both ``[rows]``.

    It lies midway between the log odds of two rows. Of equally good thresholds the one closest to 0.5 is taken.
    """
    order = np.argsort(odds, kind="stable")
    ascending, positive = odds[order], labels[order] == 1
    levels = np.unique(np.clip(odds, -LARGEST_LOG_ODDS - 1, LARGEST_LOG_ODDS + 1))
    cuts = np.concatenate([levels[:1] - 1, (levels[:-1] + levels[1:]) / 2, levels[-1:] + 1])
    thresholds = 1 / (1 + np.exp(-cuts))
    # Rows are decided by the rounded thresholds.
    below = np.searchsorted(ascending, [log_odds(each) for each in thresholds.tolist()], side="right")
    missed = np.concatenate([[0], np.cumsum(positive)])[below]
    refused = np.concatenate([[0], np.cumsum(~positive)])[below]
    found, alarms = np.count_nonzero(positive) - missed, np.count_nonzero(~positive) - refused
    if rule.costs:
        value = -(rule.costs[0] * alarms + rule.costs[1] * missed)
    else:
        wrong = alarms + missed
        value = np.mean([2 * hits / np.maximum(2 * hits + wrong, 1) for hits in (found, refused)], axis=0)
    best = np.flatnonzero(value == value.max())
    return float(thresholds[best[np.argmin(np.abs(cuts[best]))]])


def count_decisions(decisions: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Count rows by class, int64 ``[classes, classes]``: rows are true, columns predicted classes."""
    cells = labels.astype(np.int64) * classes + decisions
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def macro_f1(confusion: np.ndarray) -> float:
    """Return the mean F1 of the classes that occur in truth or prediction."""
    hits = np.diagonal(confusion)
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)
    occurs = occurrences > 0
    return float(np.mean(2 * hits[occurs] / occurrences[occurs]))


def area_under_curve(odds: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve for class 1, by ranks (Mann, Whitney 1947); both classes must occur."""
    from scipy.stats import rankdata

    positive = labels == 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return float((rankdata(odds)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
