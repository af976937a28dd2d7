"""Quality test of a variant: passed, failed, or not significant ("can't tell") with the available rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from slipstream.shared.artifacts.results.export import QualityFigures
from slipstream.shared.comparison import rmse, tokens
from slipstream.shared.formatting import NO_LIMIT
from slipstream.shared.models import metrics

# On b of n rows only FP32 is right, on c rows only the variant; the loss is (b - c) / n. The limits are those of
# Tango's score test for paired proportions ("Equivalence test and confidence interval for the difference in proportions
# for the paired-sample design", Statistics in Medicine 17, 1998). Its variance is estimated under the tested loss, so
# the interval has a width even if FP32 and the variant never disagree. If c is 0, Clopper and Pearson's exact limit of
# b in n is used if it is wider: at 0 disagreements in 265 rows 1.12 points instead of Tango's 1.01. If b is 0, the
# limit of the gain is treated likewise.
#
# Enumerated over all outcomes, for 265 to 20,000 rows, true losses of 0.5, 1 and 2 points and disagreements up to 20 %
# of the rows, the upper 95 % limit lies below the true loss in at most 5.3 % of the draws (5.0 % from 2,500 rows on).
#: Bisection steps over possible losses; the limit, a share of the rows, is exact to 1e-12.
HALVINGS = 42
#: Largest number of rows that :func:`rows_enough` considers.
MOST_ROWS = 10**9


def tango_statistic(b: np.ndarray, c: np.ndarray, n: float, loss: np.ndarray) -> np.ndarray:
    """Return Tango's statistic, which is standard normal if the true loss is ``loss``."""
    q = -b - c + (2 * n - b + c) * loss
    # Maximum likelihood share of rows on which only the variant is right, given ``loss``.
    share = (np.sqrt(np.maximum(q * q + 8 * n * c * loss * (1 - loss), 0)) - q) / (4 * n)
    variance = n * (2 * share + loss * (1 - loss))
    return (b - c - n * loss) / np.sqrt(np.maximum(variance, 1e-300))


def upper_limit(b: ArrayLike, c: ArrayLike, n: int, error: float) -> np.ndarray:
    """Return the upper limit of the true loss, as a share of the rows, at level 1 - ``error``.

    ``b`` and ``c`` are the counts of rows on which only FP32 and only the variant is right.
    """
    from scipy.stats import norm

    b, c = np.asarray(b, float), np.asarray(c, float)
    least = -norm.ppf(1 - error)
    low, high = np.maximum((b - c) / n, -1.0), np.ones(np.broadcast(b, c).shape)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        possible = tango_statistic(b, c, n, middle) > least
        low, high = np.where(possible, middle, low), np.where(possible, high, middle)
    high = np.where(c == 0, np.maximum(high, metrics.upper_limit(b, n, error)), high)
    return np.where(b == 0, np.maximum(high, -metrics.lower_limit(c, n, error)), high)


def lower_limit(b: ArrayLike, c: ArrayLike, n: int, error: float) -> np.ndarray:
    """Return the lower limit of the true loss, as a share of the rows, at level 1 - ``error``."""
    return -upper_limit(c, b, n, error)


def rows_enough(b: int, c: int, n: int, most: float, error: float) -> int | None:
    """Return about how many rows would show a loss below ``most``, if b / n and c / n stay the same.

    None if the observed loss is not below ``most``, or if more than :data:`MOST_ROWS` would be needed.
    """
    if (b - c) / n >= most:
        return None

    def shows(rows: int) -> bool:
        scaled = rows / n
        return bool(upper_limit(b * scaled, c * scaled, rows, error) < most)

    high = n
    while not shows(high):
        high *= 2
        if high > MOST_ROWS:
            return None
    low = high // 2
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    # Two digits: the shares are an estimate.
    step = 10 ** max(0, int(math.log10(high)) - 1)
    return -(-high // step) * step


Answer = Literal["passed", "failed", "can't tell"]
#: Probability that some variant passes although its true loss is ``max_loss``, over all variants tested on the rows.
ERROR = 0.05
UNITS = {
    "classification": "points of accuracy",
    "regression": "% of RMSE",
    "next token": "points of accuracy over tokens",
}


@dataclass(frozen=True)
class QualityLoss:
    """Loss against FP32 in points of accuracy or percent of RMSE.

    The limits ``low`` and ``high`` each hold with probability ``level``.
    """

    loss: float
    low: float
    high: float
    level: float
    rows: int
    #: Rows that would show a loss below the allowed loss; None if no number would, or if unknown (RMSE).
    rows_enough: int | None

    def answer(self, most: float) -> Answer:
        """Return "passed" or "failed" if a loss below or above ``most`` is significant, else "can't tell"."""
        if self.high < most:
            return "passed"
        return "failed" if self.low > most else "can't tell"

    def figures(self, most: float, evidence: str) -> QualityFigures:
        return QualityFigures(**vars(self), evidence=evidence, answer=self.answer(most))


def quality_loss(
    task: str, truth: np.ndarray, fp32: np.ndarray, variant: np.ndarray, most: float, judged: int = 1
) -> QualityLoss:
    """Return the loss of ``variant`` against ``fp32``, both as :func:`.predict.predict_records` returns.

    ``most`` is the allowed loss. ``judged`` variants are tested on the same rows: by Bonferroni's correction each may
    err with ``ERROR / judged``.
    """
    return paired_loss(task, truth, predicted_answers(task, fp32), predicted_answers(task, variant), most, judged)


def predicted_answers(task: str, outputs: np.ndarray) -> np.ndarray:
    """Return predicted classes or values ``[rows]``; for tokens True where right, bool ``[rows, length]``."""
    if task == "next token":
        return outputs[..., 0] > 0
    return outputs.argmax(axis=1) if task == "classification" else outputs[:, 0].astype(np.float64)


def correct_predictions(task: str, outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return True where a prediction is right: ``[rows]`` for classes, ``[targets]`` for tokens with a target."""
    answers = predicted_answers(task, outputs)
    return answers[truth >= 0] if task == "next token" else answers == truth


def paired_loss(
    task: str, truth: np.ndarray, before: np.ndarray, after: np.ndarray, most: float, judged: int = 1
) -> QualityLoss:
    """Return the loss of ``after`` against ``before``, both from :func:`predicted_answers`, given ``truth``."""
    error, rows = ERROR / judged, len(before)
    if task == "next token":
        # Tokens that are not learned are right in neither.
        lost = tokens.lost_by_row(before, after) * (truth.size / np.count_nonzero(truth >= 0))
        low, high = tokens.lower_limit(lost, error), tokens.upper_limit(lost, error)
        enough = tokens.rows_enough(lost, most / 100, error) if most else None
        return QualityLoss(100 * float(lost.mean()), 100 * low, 100 * high, 1 - error, rows, enough)
    if task == "classification":
        right, still = before == truth, after == truth
        b, c = int(np.sum(right & ~still)), int(np.sum(still & ~right))
        low, high = float(lower_limit(b, c, rows, error)), float(upper_limit(b, c, rows, error))
        enough = rows_enough(b, c, rows, most / 100, error) if most else None
        return QualityLoss(100 * (b - c) / rows, 100 * low, 100 * high, 1 - error, rows, enough)
    then, now = ((answers - truth) ** 2 for answers in (before, after))
    value = float(rmse.relative_rmse_growth(then, now))
    low, high = float(rmse.lower_limit(then, now, error)), float(rmse.upper_limit(then, now, error))
    return QualityLoss(100 * value, 100 * low, 100 * high, 1 - error, rows, None)


def in_words(loss: QualityLoss, task: str, most: float, evidence: str) -> str:
    """Describe the test's result, with limit and number of rows, as half a sentence."""
    unit, answer = UNITS[task], loss.answer(most)
    limit = f"at most {loss.high:.2f}" if loss.high < NO_LIMIT else "with no upper limit"
    seen = f"it lost {loss.loss:.2f} {unit} on {loss.rows:,} {evidence} rows, {limit} ({100 * loss.level:.3g} % limit)"
    if answer == "passed":
        return f"{seen}, less than the {most:g} allowed"
    if answer == "failed":
        return f"{seen} and at least {loss.low:.2f}, more than the {most:g} allowed"
    more = f"; about {loss.rows_enough:,} rows would be enough" if (loss.rows_enough or 0) > loss.rows else ""
    return f"not significant with {loss.rows:,} rows: {seen}, which may be more than the {most:g} allowed{more}"
