"""If the baseline is better than the model, the first screen says so, and a setting refuses the promotion."""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from scipy.stats import norm

from slipstream.pipeline.evaluate.engine import evaluate
from slipstream.pipeline.promote.comparison import against_baseline
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.report.terminal import quality_lines
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.evaluation import Evaluation, Gain, read_evaluation
from slipstream.shared.artifacts.results.scoring import PromotionDecision
from slipstream.shared.comparison.baseline import baseline_wins
from slipstream.shared.models.trained import TrainedModel
from tests.support.command_line import run_in
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.raw_tables import mixed_table
from tests.support.toys import trained_on

FIRST = PromotionDecision(True, 1, "it is the first in this registry")
REFUSE = PromotionConfig(worse_than_baseline="refuse")


@pytest.fixture(scope="module")
def beaten(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """The evaluation of a model that was hardly trained."""
    place = tmp_path_factory.mktemp("beaten")
    data = PreparedData.open(mixed_table(place / "data", "classification"))
    evaluate(place / "out", cast(TrainedModel, trained_on(data, 3)), data, {})
    return read_evaluation(place / "out")


def test_the_first_screen_says_it_in_one_sentence_with_the_interval(beaten: Evaluation) -> None:
    lines = " ".join(" ".join(quality_lines(beaten)).split())
    gain = beaten.gain
    interval = f"{-gain.high:.2f} to {-gain.low:.2f} with 95 % confidence"
    assert gain.high < 0
    assert (
        f"HistGradientBoosting, the baseline, is better than this model by {-gain.value:.2f} points, {interval};"
        in lines
    )
    # Wald's interval of paired proportions, an approximation of Tango's.
    difference = (beaten.baseline.accuracy or 0) - (beaten.model.accuracy or 0)
    assert -gain.value == pytest.approx(100 * difference)
    widest = 100 * norm.ppf(0.975) * np.sqrt(1 / beaten.rows)
    assert -gain.value - widest < -gain.high < -gain.value < -gain.low < -gain.value + widest


def test_nothing_is_said_of_a_baseline_that_is_not_shown_to_be_better(beaten: Evaluation) -> None:
    equal = replace(beaten, gain=Gain(-0.1, -1.0, 0.8))
    assert baseline_wins(equal) == "" and "is better" not in " ".join(quality_lines(equal))
    assert against_baseline(FIRST, equal, REFUSE) == FIRST


def test_only_the_setting_refuses(beaten: Evaluation) -> None:
    assert against_baseline(FIRST, beaten, PromotionConfig()) == FIRST
    refused = against_baseline(FIRST, beaten, REFUSE)
    assert not refused.passed and refused.why == f"{baseline_wins(beaten)} (promotion.worse_than_baseline)"
    other = PromotionDecision(False, 2, "another reason")
    assert against_baseline(other, beaten, REFUSE) == other


@pytest.mark.prove
def test_a_run_on_a_checkerboard_is_not_promoted(tmp_path: Path) -> None:
    """Trees learn a checkerboard at once, a small model in few steps does not."""
    generator = np.random.default_rng(0)
    x = generator.uniform(0, 6, (4000, 2))
    labels = np.where(np.floor(x).sum(axis=1) % 2 == 0, "white", "black")
    rows = [f"{a:.4f},{b:.4f},{label}" for (a, b), label in zip(x, labels, strict=True)]
    (tmp_path / "board.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    settings = {
        "model": {"arguments": {"hidden": [8], "frequencies": 0}},
        "training": {"epochs": 1},
        "export": EXPORT,
        "collectives": NETWORK,
        "promotion": {"worse_than_baseline": "refuse"},
    }
    arguments = ("--registry", "registry", "--data", "board.csv", "--target", "y", "--config", json.dumps(settings))
    ended = run_in(tmp_path, *arguments, workflow="train_and_promote")
    said = " ".join(ended.stdout.split())
    assert ended.returncode == 0, ended.stdout
    assert "HistGradientBoosting, the baseline, is better than this model by" in said
    assert "Promoted no:" in said and "(promotion.worse_than_baseline)" in said
    assert Registry(str(tmp_path / "registry")).history() == []
