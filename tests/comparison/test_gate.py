"""The gate: bounds of losses, and the choice from measured figures."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, binom

from slipstream.pipeline.export.choose import Contender, VariantChoice, choose_variant
from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.results.export import Estimate, LatencyFigures
from slipstream.shared.comparison.quality import (
    ERROR,
    QualityLoss,
    in_words,
    lower_limit,
    paired_loss,
    quality_loss,
    rows_enough,
    upper_limit,
)
from slipstream.shared.errors import UserError
from tests.support.wording import refuses, same_wording

DRAWS = 2000


def draws(rows: int, only_fp32: float, only_variant: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts of rows on which only one of the two is right, in ``DRAWS`` test sets."""
    shares = [only_fp32, only_variant, 1 - only_fp32 - only_variant]
    counts = np.random.default_rng(0).multinomial(rows, shares, DRAWS)
    return counts[:, 0], counts[:, 1]


@pytest.mark.parametrize("rows", [265, 2500, 5000])
@pytest.mark.parametrize("also", [0.0, 0.01, 0.05])
def test_a_variant_that_loses_two_points_hardly_ever_passes(rows: int, also: float) -> None:
    b, c = draws(rows, 0.02 + also, also)
    assert np.mean(upper_limit(b, c, rows, ERROR) < 0.01) <= 0.05


@pytest.mark.parametrize("rows", [265, 2500, 5000])
@pytest.mark.parametrize("also", [0.0, 0.002, 0.05])
def test_the_limit_is_below_the_true_loss_in_one_of_twenty(rows: int, also: float) -> None:
    """Of draws that truly lose just what is allowed about 5 % pass; two standard errors of 2,000 draws are 1 %."""
    b, c = draws(rows, 0.01 + also, also)
    assert np.mean(upper_limit(b, c, rows, ERROR) < 0.01) <= 0.06
    assert np.mean(lower_limit(b, c, rows, ERROR) > 0.01) <= 0.065


@pytest.mark.parametrize("error", [ERROR, ERROR / 3])
def test_a_gain_is_not_shown_more_often_than_is_said(error: float) -> None:
    """The variant alone is right on 1 % of 1,000 rows and never wrong alone, by binomial arithmetic. Tango's limit was
    below the true gain with 1.5 times the probability."""
    gained = np.arange(1001)
    missed = upper_limit(np.zeros(1001), gained, 1000, error) < -0.01
    assert binom.pmf(gained, 1000, 0.01) @ missed <= error


def test_a_variant_that_loses_nothing_passes() -> None:
    b, c = draws(2500, 0.005, 0.005)
    assert np.mean(upper_limit(b, c, 2500, ERROR) < 0.01) >= 0.95


def test_the_digits_can_never_show_one_point() -> None:
    """0 disagreements in 265 rows: 1 - 0.05^(1/265), the exact limit."""
    assert upper_limit(np.array(0), np.array(0), 265, 0.05) == pytest.approx(1 - 0.05 ** (1 / 265))
    assert upper_limit(np.array(4), np.array(0), 265, 0.05) >= beta.ppf(0.95, 5, 261) - 1e-9
    enough = rows_enough(0, 0, 265, 0.01, 0.05)
    assert enough is not None and 299 <= enough <= 330  # log(0.05) / log(0.99) = 298.07
    assert rows_enough(3, 0, 265, 0.01, 0.05) is None  # it lost 1.13 points


@pytest.mark.parametrize("most", [99.9, 100.0, 150.0])
@pytest.mark.parametrize("task", ["classification", "next token", "regression"])
def test_a_gate_that_allows_everything_passes_equal_predictions(task: str, most: float) -> None:
    """With scipy's exact limit for no loss in 40 rows, where there is one; one row is enough at 100 points."""
    right = np.random.default_rng(0).random((40, 16)) < 0.5
    truth, before = np.zeros(right.shape), right
    if task != "next token":
        truth, before = truth[:, 0], right[:, 0].astype(float)
    loss = paired_loss(task, truth, before, before.copy(), most)
    assert loss.loss == 0 and loss.answer(most) == "passed"
    assert task == "regression" or loss.high == pytest.approx(100 * beta.ppf(1 - ERROR, 1, 40))
    assert (loss.rows_enough or 1) <= 40 and (task != "next token" or loss.rows_enough == 1)


def test_limits_lie_around_the_loss_and_mirror_each_other() -> None:
    b, c = np.array([5, 30, 0, 265]), np.array([3, 40, 7, 0])
    low, high = lower_limit(b, c, 265, 0.05), upper_limit(b, c, 265, 0.05)
    assert np.all(low < (b - c) / 265) and np.all(high[:3] > (b - c)[:3] / 265) and high[3] == pytest.approx(1)
    assert upper_limit(c, b, 265, 0.05) == pytest.approx(-low)


def test_more_variants_on_the_same_rows_need_more_evidence() -> None:
    truth = np.zeros(2000, int)
    fp32 = np.tile([1.0, 0.0], (2000, 1))
    variant = fp32.copy()
    variant[:9] = [0.0, 1.0]
    one, three = (quality_loss("classification", truth, fp32, variant, 1.0, judged) for judged in (1, 3))
    assert one.loss == three.loss == pytest.approx(0.45)
    assert one.high < three.high and three.level == pytest.approx(1 - 0.05 / 3)


def test_three_answers() -> None:
    assert QualityLoss(0.1, -0.2, 0.5, 0.95, 900, None).answer(1.0) == "passed"
    assert QualityLoss(0.9, 0.5, 1.2, 0.95, 900, 2000).answer(1.0) == "can't tell"
    assert QualityLoss(3.0, 1.5, 4.0, 0.95, 900, None).answer(1.0) == "failed"
    words = in_words(QualityLoss(0.0, -1.1, 1.12, 0.95, 265, 300), "classification", 1.0, "test")
    same_wording(words)


def figures(speed: float, p50: float, low: float | None = None) -> LatencyFigures:
    estimate = Estimate(p50, 0.98 * p50, 1.02 * p50)
    return LatencyFigures(estimate, None, None, 330, Estimate(speed, low or 0.98 * speed, 1.02 * speed))


SHOWN = QualityLoss(0.1, -0.2, 0.4, 0.95, 3000, None)
OPEN = QualityLoss(0.0, -1.1, 1.12, 0.95, 265, 300)
BAD = QualityLoss(3.0, 2.0, 4.0, 0.95, 3000, None)


def contender(name: str, speed: float, loss: QualityLoss | None = SHOWN, size: int = 100, **speeds: float) -> Contender:
    by_batch = {str(batch): speeds.get(f"at{batch}", speed) for batch in (1, 32, 256)}
    return Contender(name, size, {batch: figures(each, 1 / each) for batch, each in by_batch.items()}, loss)


FP32 = Contender("onnx-fp32", 400, {batch: figures(1.0, 1.0) for batch in ("1", "32", "256")})


def decided(*others: Contender, **settings: Any) -> VariantChoice:
    return choose_variant("classification", FP32, others, ExportConfig(**settings))


def test_faster_and_shown_to_be_good_is_chosen() -> None:
    decision = decided(contender("int8", 2.0), contender("worse", 4.0, BAD), contender("faster", 3.0))
    assert decision.chosen == "faster"
    verdicts = {name: verdict.short for name, verdict in decision.verdicts.items()}
    assert verdicts == {"int8": "passed", "worse": "failed", "faster": "chosen"}
    same_wording(decision.why)


def test_the_lower_limit_of_the_speed_decides() -> None:
    wide = Contender("wide", 100, {batch: figures(1.5, 0.6, low=1.04) for batch in ("1", "32", "256")}, SHOWN)
    assert decided(wide).chosen == "onnx-fp32"
    assert decided(wide, min_speedup=1.03).chosen == "wide"
    assert decided(contender("slow", 0.5)).verdicts["slow"].short == "slower"


def test_in_doubt_fp32_stays_unless_asked_otherwise() -> None:
    kept, taken = decided(contender("int8", 2.0, OPEN)), decided(contender("int8", 2.0, OPEN), when_in_doubt="take")
    assert kept.chosen == "onnx-fp32" and kept.verdicts["int8"].short == "can't tell"
    same_wording(kept.why)
    assert taken.chosen == "int8" and "export.when_in_doubt" in taken.why


def test_each_batch_size_has_its_best_and_the_one_asked_for_is_deployed() -> None:
    others = (contender("small", 1.5, at256=1.1), contender("large", 0.8, at256=3.0, at32=1.02))
    assert decided(*others).best == {"1": "small", "32": "small", "256": "large"}
    assert decided(*others, decide_at_batch=256).chosen == "large"


def test_size_asks_for_no_speed() -> None:
    others = (contender("tiny", 0.5, size=50), contender("quick", 3.0, size=90))
    assert decided(*others, optimise="size").chosen == "tiny"
    assert decided(contender("tiny", 0.5, BAD, size=50), optimise="size").chosen == "onnx-fp32"


def test_a_budget_that_only_a_variant_meets() -> None:
    """FP32 takes 1 ms: within 0.99 ms a variant that is hardly faster is the only one to deploy."""
    assert decided(contender("int8", 1.04), budget_ms=0.99).chosen == "int8"
    assert decided(contender("int8", 2.0, size=100), budget_mb=0.0002).chosen == "int8"
    assert decided(contender("small", 0.7, size=100), budget_mb=0.0002).chosen == "small"


@pytest.mark.parametrize("speed", [0.7, 1.0, 2.0])
def test_a_budget_that_decides_is_the_reason(speed: float) -> None:
    """Also for a variant that is slower than FP32, which may not be deployed."""
    choice = decided(contender("int8", speed, size=100), budget_mb=0.0002)
    assert choice.verdicts["int8"].short == "chosen"
    same_wording(choice.why)


@pytest.mark.parametrize(
    "settings", [{"budget_ms": 0.1}, {"budget_mb": 0.00001}, {"budget_ms": 9.0, "budget_percentile": "p99"}]
)
def test_a_budget_that_nobody_meets(settings: dict[str, Any]) -> None:
    with refuses(UserError):
        decided(contender("int8", 2.0), **settings)


def test_nothing_else_to_choose_from() -> None:
    same_wording(decided().why)


def test_a_price_is_needed_to_optimise_the_cost() -> None:
    with refuses(UserError, match=r"export\.price_per_hour:"):
        ExportConfig(optimise="cost")
