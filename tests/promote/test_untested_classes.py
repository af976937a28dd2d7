"""A class without a test row is named, is a doubt for a promotion, and accuracy is shown next to rank statistics."""

from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from slipstream.pipeline.evaluate.engine import evaluate
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.report.terminal import quality_lines
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData
from slipstream.shared.artifacts.results.evaluation import read_evaluation
from slipstream.shared.models.metrics import classification_scores
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source.config import DataConfig, SplitConfig
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.toys import trained_on


def frauds(directory: Path, number: int, *, untested: bool) -> PreparedData:
    """Prepare a table in which ``number`` of 600 rows are frauds; the first split that has, or lacks, them in test."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(600, 2)), columns=["a", "b"])
    frame["city"] = draw.choice(["Oslo", "Rome"], 600)
    frame["y"] = np.where(np.arange(600) < number, "fraud", "valid")
    frame.loc[: number - 1, "a"] += 2
    for seed in range(50):
        prepare(directory / f"{seed}", frame, "y", DataConfig(split=SplitConfig(seed=seed)), {})
        data = PreparedData.open(directory / f"{seed}")
        if (data.card["classes"]["fraud"]["test"] == 0) == untested:
            return data
    raise AssertionError("no split fits")


@pytest.mark.prove
def test_a_class_without_a_test_row_is_a_doubt(tmp_path: Path) -> None:
    data = frauds(tmp_path / "data", 5, untested=True)
    counts = {split: int(np.sum(data.split(split)[TARGET] == 0)) for split in ("train", "validation", "test")}
    assert counts["test"] == 0
    (warning,) = [each for each in data.card["warnings"] if "no test row" in each]
    assert "'fraud'" in warning and "its 5 rows" in warning
    model, registry = package(tmp_path / "model", data), Registry(str(tmp_path / "registry"))
    found = put(model, registry, data, PromotionConfig())
    assert (
        not found.promoted and f"'fraud' ({counts['train']} training rows)" in found.why and registry.promoted() is None
    )
    found = put(model, registry, data, PromotionConfig(when_in_doubt="take"))
    assert found.promoted and f"'fraud' ({counts['train']} training rows)" in found.why and "when_in_doubt" in found.why
    # Against a model in service, even if the comparison passes.
    other = package(tmp_path / "other", data, steps=151)
    found = put(other, registry, data, PromotionConfig(max_loss=100))
    assert not found.promoted and "'fraud'" in found.why
    assert put(other, registry, data, PromotionConfig(max_loss=100, when_in_doubt="take")).promoted


@pytest.mark.prove
def test_a_class_with_test_rows_is_no_doubt(tmp_path: Path) -> None:
    data = frauds(tmp_path / "data", 20, untested=False)
    model, registry = package(tmp_path / "model", data), Registry(str(tmp_path / "registry"))
    found = put(model, registry, data, PromotionConfig())
    assert found.promoted and "fraud" not in found.why


def test_the_headline_of_an_unbalanced_target(tmp_path: Path) -> None:
    data = frauds(tmp_path / "data", 30, untested=False)
    evaluate(tmp_path / "evaluation", cast(TrainedModel, trained_on(data, 100)), data, {})
    found = read_evaluation(tmp_path / "evaluation")
    truth = data.split("test")[TARGET]
    assert found.majority == pytest.approx(np.mean(truth == 1))
    first, second, *_ = [line.strip() for line in quality_lines(found) if "ROC" in line or "accuracy" in line]
    assert "test accuracy" in first
    assert second == (
        f"ROC AUC {found.model.roc_auc:.3f}, average precision {found.model.average_precision:.3f}, majority baseline "
        f"{100 * np.mean(truth == 1):.2f} %"
    )


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_rank_statistics_are_those_of_scikit_learn(share: float) -> None:
    draw = np.random.default_rng(1)
    labels = (draw.random(400) < share).astype(int)
    positive = np.clip(0.3 * labels + draw.random(400) * 0.7, 0, 1)
    found = classification_scores(np.stack([1 - positive, positive], axis=1), labels)
    rarer = int(labels.mean() <= 0.5)
    expected = average_precision_score(labels == rarer, positive if rarer else 1 - positive)
    assert found.roc_auc == pytest.approx(roc_auc_score(labels, positive))
    assert found.average_precision == pytest.approx(expected)
