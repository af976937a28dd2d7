"""How much the new model loses against the old one on the same rows, with one-sided 95 % limits.

Of n rows the old one alone is right on b and the new one alone on c; the loss is (b - c) / n, its limits are those of
Tango's score test for paired proportions (Statistics in Medicine 17, 1998), and where c is 0 Clopper and Pearson's of b
in n if that is wider. RMSE: percentiles of the ratio over rows drawn with replacement (Efron and Tibshirani, 1993).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
UNITS = {"classification": "points of accuracy", "regression": "% of RMSE"}
DRAWS, SEED = 2000, 0


@dataclass(frozen=True)
class Loss:
    """The loss in points of accuracy or percent of RMSE; each of the limits holds with 95 % confidence."""

    value: float
    low: float
    high: float
    rows: int

    def answer(self, most: float) -> Literal["passed", "failed", "can't tell"]:
        """Whether a loss below ``most`` is shown, or one above it, or neither."""
        if self.high < most:
            return "passed"
        return "failed" if self.low > most else "can't tell"


def loss_of(task: str, truth: np.ndarray, old: np.ndarray, new: np.ndarray) -> Loss:
    """The loss of ``new`` against ``old``: class numbers or values ``[rows]``, as ``truth``."""
    rows = len(truth)
    if task == "classification":
        right, still = old == truth, new == truth
        b, c = int(np.sum(right & ~still)), int(np.sum(still & ~right))
        return Loss(100 * (b - c) / rows, -100 * upper_limit(c, b, rows), 100 * upper_limit(b, c, rows), rows)
    squares = np.stack([(old - truth) ** 2, (new - truth) ** 2])
    rng = np.random.default_rng(SEED)
    drawn = np.array([squares[:, rng.integers(0, rows, rows)].sum(axis=1) for _ in range(DRAWS)])
    low, high = np.quantile(percent_worse(drawn.T), (1 - CONFIDENCE, CONFIDENCE))
    return Loss(float(percent_worse(squares.sum(axis=1))), float(low), float(high), rows)


def percent_worse(squares: np.ndarray) -> np.ndarray:
    """By how many percent the second RMSE is above the first, from sums of squared errors ``[2, ...]``."""
    return 100 * (np.sqrt(squares[1] / np.maximum(squares[0], 1e-300)) - 1)


def upper_limit(b: int, c: int, n: int) -> float:
    """The loss that the true one does not exceed, with 95 % confidence, as a share of the rows."""
    from scipy.optimize import brentq
    from scipy.stats import beta, norm

    least = -norm.ppf(CONFIDENCE)
    found = brentq(lambda loss: score(b, c, n, loss) - least, (b - c) / n + 1e-12, 1 - 1e-12) if b < n else 1.0
    return max(found, float(beta.ppf(CONFIDENCE, b + 1, n - b))) if c == 0 and b < n else found


def score(b: int, c: int, n: int, loss: float) -> float:
    """Tango's statistic of the hypothesis that the true loss is ``loss``."""
    q = (2 * n - b + c) * loss - b - c
    share = (np.sqrt(max(q * q + 8 * n * c * loss * (1 - loss), 0.0)) - q) / (4 * n)
    return float((b - c - n * loss) / np.sqrt(max(n * (2 * share + loss * (1 - loss)), 1e-300)))


def in_words(loss: Loss, task: str, most: float) -> str:
    """What is shown, with its limits and the rows that it rests on."""
    unit = UNITS[task]
    seen = f"it lost {loss.value:.2f} {unit} on {loss.rows:,} test rows, at most {loss.high:.2f} (95 %)"
    return {
        "passed": f"{seen}, less than the {most:g} allowed",
        "failed": f"{seen} and at least {loss.low:.2f}, more than the {most:g} allowed",
        "can't tell": f"can't tell with {loss.rows:,} rows: {seen}, which may be more than the {most:g} allowed",
    }[loss.answer(most)]
