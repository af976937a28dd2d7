"""The limits of a paired loss: by known values, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from tasks.export.registry.paired import loss_of, upper_limit


def score_by_hand(b: int, c: int, n: int, loss: float) -> float:
    """Tango's statistic from the constrained maximum of the likelihood, which is found by trying all shares."""
    share = np.linspace(max(0.0, -loss), (1 - loss) / 2, 400_001)[1:-1]
    likelihood = b * np.log(share + loss) + c * np.log(share) + (n - b - c) * np.log(1 - 2 * share - loss)
    best = share[np.argmax(likelihood)]
    return float((b - c - n * loss) / np.sqrt(n * (2 * best + loss - loss**2)))


@pytest.mark.parametrize(("b", "c", "n"), [(5, 5, 2500), (10, 3, 500), (3, 10, 500), (40, 20, 265)])
def test_the_limit_is_the_loss_that_is_just_not_rejected(b: int, c: int, n: int) -> None:
    assert score_by_hand(b, c, n, upper_limit(b, c, n)) == pytest.approx(-1.6449, abs=1e-3)


@pytest.mark.parametrize(("b", "n"), [(0, 265), (0, 2500), (1, 100)])
def test_without_a_gain_the_limit_is_exact(b: int, n: int) -> None:
    """The chance of at most b losses in n rows is 5 % at the limit."""
    assert binom.cdf(b, n, upper_limit(b, 0, n)) == pytest.approx(0.05)


def test_a_model_that_loses_two_points_seldom_passes() -> None:
    """At 265, 2,500 and 5,000 rows with 4 % disagreement: at most 5 % of the draws, and those of an equal one pass."""
    rng = np.random.default_rng(0)
    for rows in (265, 2500, 5000):
        wrong = [upper_limit(b, c, rows) < 0.02 for b, c, _ in rng.multinomial(rows, [0.03, 0.01, 0.96], 2000)]
        assert np.mean(wrong) <= 0.06
    equal = [upper_limit(b, c, 2500) < 0.01 for b, c, _ in rng.multinomial(2500, [0.005, 0.005, 0.99], 500)]
    assert np.mean(equal) >= 0.95


def test_rmse_in_percent() -> None:
    rng = np.random.default_rng(0)
    truth, noise = np.zeros(4000), rng.normal(size=4000)
    loss = loss_of("regression", truth, noise, 1.05 * noise)
    assert loss.value == pytest.approx(5) and loss.low == pytest.approx(5) and loss.high == pytest.approx(5)
    other = loss_of("regression", truth, noise, rng.normal(size=4000) * 1.05)
    assert other.low < 5 < other.high and 1 < other.high - other.low < 8
    assert (other.answer(30), other.answer(-10), other.answer(5)) == ("passed", "failed", "can't tell")
