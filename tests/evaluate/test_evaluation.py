"""Evaluation of small models on small data."""

import dataclasses
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.operations.proofs.gpu.trainings import TABLE_ROWS, write_prepared, write_table
from slipstream.pipeline.evaluate.engine import (
    MOST_PIXELS,
    categorical_columns,
    evaluate,
    feature_table,
    gain_over,
    train_baseline,
)
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.trained import TrainedModel
from tests.support.proving import first_few
from tests.support.toys import ToyTrained, images, trained_on
from tests.support.wording import refuses


def evaluated(directory: Path, trained: ToyTrained, data: PreparedData) -> Artifact:
    return evaluate(directory, cast(TrainedModel, trained), data, {})


def test_classification(tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", "classification")
    found = evaluated(tmp_path / "out", trained_on(data), data).read_json("evaluation.json")
    assert (
        found["rows"]
        == TABLE_ROWS["test"]
        == np.sum(found["confusion"])
        == sum(b["rows"] for b in found["calibration"])
    )
    assert found["metric"] == {"name": "accuracy", "value": found["model"]["accuracy"]}
    assert found["model"]["accuracy"] == np.trace(found["confusion"]) / found["rows"]
    assert found["model"]["accuracy"] > 0.9
    assert found["baseline"]["accuracy"] > 0.9
    assert found["baseline"]["rows_trained"] == TABLE_ROWS["train"]
    assert set(found["model"]) <= set(found["baseline"])
    assert found["scatter"] is None


def test_a_difference_that_few_rows_do_not_show_has_an_interval_around_0() -> None:
    """The model alone is right on 4 of 265 rows, which is a gain; with 3 on which the baseline alone is, it is none."""
    truth = np.zeros(265, int)
    right, baseline_outputs = np.tile([1.0, 0.0], (265, 1)), np.tile([1.0, 0.0], (265, 1))
    baseline_outputs[:4] = [0.0, 1.0]
    found = gain_over(baseline_outputs, right, "classification", truth)
    assert found.value == pytest.approx(400 / 265) and found.low > 0 and found.shown == 1
    other = right.copy()
    other[4:7] = [0.0, 1.0]
    doubt = gain_over(baseline_outputs, other, "classification", truth)
    assert doubt.value > 0 > doubt.low and doubt.shown == 0
    swapped = gain_over(other, baseline_outputs, "classification", truth)
    assert (swapped.low, swapped.high) == (pytest.approx(-doubt.high), pytest.approx(-doubt.low))


@pytest.mark.parametrize("task", first_few(["classification", "regression"]))
def test_the_interval_of_the_gain_misses_in_one_of_twenty(task: str) -> None:
    """Of 300 test sets of 265 rows on which neither is better; two standard errors are 2.5 %."""
    shown, random = 0, np.random.default_rng(0)
    for _ in range(300):
        if task == "classification":
            ours, theirs = (np.eye(2)[(random.random(265) < 0.1).astype(int)] for _ in range(2))
            truth = np.zeros(265, int)
        else:
            truth = random.normal(size=265)
            ours, theirs = ((truth + random.normal(size=265))[:, None] for _ in range(2))
        shown += gain_over(theirs, ours, task, truth).shown != 0
    assert shown <= 0.075 * 300


def test_several_classes_have_no_roc(tmp_path: Path) -> None:
    data = images(tmp_path / "data")
    found = evaluated(tmp_path / "out", trained_on(data, steps=20), data).read_json("evaluation.json")
    assert np.shape(found["confusion"]) == (3, 3)
    assert found["roc"] is None
    assert found["model"]["roc_auc"] is None


def test_regression_is_in_units_of_the_target(tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", "regression")
    found = evaluated(tmp_path / "out", trained_on(data, steps=400), data).read_json("evaluation.json")
    errors = np.subtract(found["scatter"]["predicted"], found["scatter"]["actual"])
    assert found["model"]["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-6)
    assert found["model"]["r2"] > 0.9
    assert found["model"]["rmse"] > 0.01  # The target spreads by about 75 of its units, not by 1.
    assert found["baseline"]["r2"] > 0.9


def test_the_same_model_has_the_same_fingerprint(tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", "classification")
    trained = trained_on(data, steps=5)
    first, second = (evaluated(tmp_path / name, trained, data).fingerprint for name in ("a", "b"))
    assert first == second


def test_a_model_that_gives_nan_is_named(tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", "classification")
    trained = trained_on(data, steps=0)
    head = trained.model.head
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.bias.fill_(torch.nan)
    with refuses(UserError):
        evaluated(tmp_path / "out", trained, data)


def test_a_model_with_the_wrong_number_of_outputs_is_named(tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", "classification")

    class Wrong(nn.Module):
        def forward(self, numeric: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
            return numeric

    with pytest.raises(UserError, match=r"\(256, 6\); expected \(256, 2\)"):
        evaluated(tmp_path / "out", ToyTrained(data.signature, Wrong()), data)


def test_an_empty_test_split_is_refused(tmp_path: Path) -> None:
    full = write_table(tmp_path / "full", "classification")
    splits = {"train": np.array(full.split("train")), "test": np.zeros(0, full.signature.record)}
    data = write_prepared(tmp_path / "data", full.signature, splits)
    with pytest.raises(UserError, match=r"data\.split\.test"):
        evaluated(tmp_path / "out", trained_on(full, steps=0), data)


def test_the_baseline_learns_from_training_rows_only(tmp_path: Path) -> None:
    """With the training labels turned round, the baseline is as wrong as it was right."""
    data = write_table(tmp_path / "data", "classification")
    test = np.array(data.split("test"))
    turned = np.array(data.split("train"))
    turned[TARGET] = 1 - turned[TARGET]
    liar = write_prepared(tmp_path / "liar", data.signature, {"train": turned, "test": test})
    right, wrong = train_baseline(data, test).scores.accuracy, train_baseline(liar, test).scores.accuracy
    assert right and right > 0.9
    assert wrong is not None and wrong < 0.1


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_large_training_split_stops_by_the_validation_split(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation split with the answers of another world stops boosting at once: the scores get worse.

    One row of a class of its own is no obstacle, neither among the training rows nor among those that stop it.
    """
    monkeypatch.setattr("slipstream.pipeline.evaluate.engine.STOP_EARLY_ABOVE", 100)
    full = write_table(tmp_path / "data", task)
    splits = {name: np.array(full.split(name)) for name in TABLE_ROWS}
    signature = full.signature
    if task == "classification":
        signature = dataclasses.replace(signature, classes=("no", "yes", "rare", "unseen"))
        splits["train"][TARGET][0] = 2
        splits["validation"][TARGET][0] = 3
    honest = write_prepared(tmp_path / "honest", signature, splits)
    mean = splits["train"][TARGET].mean()
    turned = np.array(splits["validation"])
    turned[TARGET] = 1 - turned[TARGET] if task == "classification" else 2 * mean - turned[TARGET]
    misled = write_prepared(tmp_path / "misled", signature, {**splits, "validation": turned})
    metric = "log_loss" if task == "classification" else "rmse"
    good, bad = (train_baseline(data, splits["test"]).scores.of(metric) for data in (honest, misled))
    assert good and bad and bad > 1.5 * good


def test_categories_are_categories_where_boosting_can_split_on_them() -> None:
    inputs = (TensorSpec("numeric", "float32", (3,)), TensorSpec("categorical", "int32", (3,)))
    signature = Signature(inputs, "classification", "y", ("a", "b"), (4, 1000, 255))
    assert categorical_columns(signature) == [3, 5]


def test_large_images_are_thinned_for_the_baseline() -> None:
    signature = Signature((TensorSpec("image", "uint8", (3, 64, 64)),), "classification", "y", ("a", "b"))
    features = feature_table(signature, np.zeros(2, signature.record))
    assert MOST_PIXELS / 2 < features.shape[1] <= MOST_PIXELS
