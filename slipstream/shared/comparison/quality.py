"""Quality test of a variant: passed, failed, or not significant ("can't tell") with the available rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slipstream.shared.artifacts.results.export import NO_LIMIT, QualityFigures
from slipstream.shared.comparison import rmse, tokens
from slipstream.shared.comparison.accuracy import lower_limit, rows_enough, upper_limit

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


def passes_gate(answer: str, when_in_doubt: Literal["keep", "take"]) -> bool:
    """Return True if it may be taken."""
    return answer == "passed" or (answer == "can't tell" and when_in_doubt == "take")


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
