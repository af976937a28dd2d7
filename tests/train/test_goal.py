"""Metric, class weights, threshold and schedule of a training, compared with scikit-learn and torch."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score
from sklearn.utils.class_weight import compute_class_weight
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.train.checks import check_training
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.loop.goal import JudgedRows, class_weights, together
from slipstream.pipeline.train.loop.optimizer import learning_rate
from slipstream.pipeline.train.loop.step import rows_loss
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.results.training import ThresholdRule
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.decision import area_under_curve, choose_threshold, with_threshold
from slipstream.shared.models.predict import decided_outputs
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source.config import DataConfig
from tests.support.proving import first_few
from tests.support.training import trained as run_training

CLASSES = ("no", "yes")
SMALL = ModelConfig("mlp", {"hidden": [8], "frequencies": 0})


def table(directory: Path, classes: tuple[str, ...] = CLASSES, rows: int = 400) -> Path:
    """Prepared data of two numbers; the second of two classes is rare."""
    task = "classification" if classes else "regression"
    signature = Signature((TensorSpec("numeric", "float32", (2,)),), task, "y", classes)
    writer = ArtifactWriter(directory)
    for seed, name in enumerate(("train", "validation", "test")):
        generator = np.random.default_rng(seed)
        records = np.zeros(rows, signature.record)
        target = generator.choice(max(len(classes), 2), rows, p=[0.85, 0.15] if len(classes) == 2 else None)
        records[TARGET] = target
        records["numeric"] = generator.normal(size=(rows, 2)) + 1.2 * target[:, None]
        with writer.create(f"{name}-00000.rows", 64 * signature.record.itemsize) as file:
            file.write(records.tobytes())
    write_record(writer, "signature.json", signature)
    writer.finish("prepare", {})
    return directory


def trained(prepared: Path, place: Path, world: int = 1, **settings: Any) -> TrainedModel:
    training = TrainingConfig(batch_size=40, precision="fp32", evaluate_every=7, **settings)
    return TrainedModel.open(run_training(prepared, place, world, training, SMALL))


# Schedule


def of_torch(name: str, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    if name == "cosine":
        return CosineAnnealingLR(optimizer, steps)
    return LinearLR(optimizer, 1.0, 0.0, steps) if name == "linear" else ConstantLR(optimizer, 1.0, 1)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1])
def test_rates_are_those_of_torchs_schedulers(name: str, warmup: float) -> None:
    total, peak = 200, 0.3
    rising = math.ceil(warmup * total)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = of_torch(name, optimizer, total - rising)
    if rising:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
        rise = LinearLR(optimizer, 1 / rising, 1.0, rising - 1)
        scheduler = SequentialLR(optimizer, [rise, of_torch(name, optimizer, total - rising)], [rising])
    found, expected = [], []
    for step in range(total):
        found.append(learning_rate(step, total, peak, warmup, name))
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


# Class weights


def test_balanced_weights_are_scikit_learns(tmp_path: Path) -> None:
    data = PreparedData.open(table(tmp_path / "prepared"))
    labels = np.array(data.split("train")[TARGET])
    expected = compute_class_weight("balanced", classes=np.arange(2), y=labels)
    found = class_weights(TrainingConfig(balance_classes=True), data)
    assert found is not None and found == pytest.approx(expected, rel=1e-6)
    given = class_weights(TrainingConfig(class_weights={"yes": 5.0}), data)
    assert given is not None and given[1] / given[0] == pytest.approx(5)
    assert np.mean(given[labels]) == pytest.approx(1)
    assert class_weights(TrainingConfig(), data) is None


def test_rows_count_by_their_weights(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    labels = np.where(draw.random(900) < 0.1, "b", "a")
    frame = pd.DataFrame({"x": draw.normal(size=900), "w": draw.integers(1, 20, 900), "y": labels})
    frame.to_csv(tmp_path / "t.csv", index=False)
    prepare(tmp_path / "prepared", str(tmp_path / "t.csv"), "y", DataConfig(weight="w"), {})
    data = PreparedData.open(tmp_path / "prepared")
    rows = data.split("train")
    expected = compute_class_weight("balanced", classes=np.arange(2), y=rows[TARGET], sample_weight=rows["weight"])
    found = class_weights(TrainingConfig(balance_classes=True), data)
    assert found is not None and found == pytest.approx(expected, rel=1e-5)
    given = class_weights(TrainingConfig(class_weights={"b": 5.0}), data)
    for weights in (found, given):
        assert weights is not None and np.mean(weights[rows[TARGET]] * rows["weight"]) == pytest.approx(1, rel=1e-5)


def test_the_loss_of_a_batch_is_torchs_with_these_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 3, generator=generator), torch.tensor([0, 1, 2, 2, 1, 0, 2], dtype=torch.int32)
    weights = torch.tensor([0.5, 2.0, 1.25])
    signature = Signature((), "classification", "y", ("a", "b", "c"))

    class State:
        model = type("Model", (), {"signature": signature})
        class_weights = weights
        teacher, fused_loss = None, False

    batch = Batch((logits,), labels, 7, 7, 0, 0.0)
    found = rows_loss(State, TrainingConfig(), batch, logits, slice(0, 7))  # type: ignore[arg-type]
    expected = torch.nn.functional.cross_entropy(logits, labels.long(), weight=weights, reduction="sum")
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


# Threshold and metrics


@pytest.mark.parametrize("costs", [None, (1.0, 1.0), (1.0, 7.0), (3.0, 0.5)])
@pytest.mark.parametrize("spread", [1.0, 5.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_no_threshold_is_better_by_scikit_learn(costs: tuple[float, float] | None, spread: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.choice(2, 120, p=[0.8, 0.2])
    odds = np.round(spread * (generator.normal(size=120) + labels), 1)  # with ties

    def value(decisions: np.ndarray) -> float:
        if costs is None:
            return float(f1_score(labels, decisions, average="macro"))
        (_, alarms), (missed, _) = confusion_matrix(labels, decisions, labels=[0, 1])
        return -float(costs[0] * alarms + costs[1] * missed)

    threshold = choose_threshold(ThresholdRule(costs), odds, labels)
    logits = np.stack([np.zeros(120), odds], axis=1)
    found = value(with_threshold(logits, threshold).argmax(axis=1))
    # A float64 separates no probabilities above log odds of 36.
    best = max(value((odds > cut).astype(int)) for cut in [-999.0, 999.0, *np.unique(odds[np.abs(odds) < 34])])
    assert found == pytest.approx(best, rel=1e-12)
    assert 0 < threshold < 1
    if spread == 1:
        assert found == value((1 / (1 + np.exp(-odds)) >= threshold).astype(int))


@pytest.mark.parametrize("answers", [(25.0, 25.0, 30.0), (-30.0, -30.0, -25.0), (39.0, 40.0, 41.0), (-41.0, -40, -39)])
@pytest.mark.parametrize("costs", [(10.0, 1.0), (1.0, 10.0)])
def test_extreme_answers_are_decided_at_least_cost(answers: tuple[float, ...], costs: tuple[float, float]) -> None:
    odds, labels = np.array(answers), np.array([0, 0, 1])
    threshold = choose_threshold(ThresholdRule(costs), odds, labels)
    logits = np.stack([np.zeros(3), odds], axis=1)
    positive = with_threshold(logits, threshold).argmax(axis=1) == 1
    cost = costs[0] * np.sum(positive & (labels == 0)) + costs[1] * np.sum(~positive & (labels == 1))
    assert cost == (0 if abs(odds[1]) < 34 else min(2 * costs[0], costs[1]))


def test_thresholds_of_before_decide_as_before() -> None:
    odds = np.linspace(-50, 50, 2001)
    for cut in (-21.0, -3.25, 0.0, 12.5, 20.5, 21.0):
        threshold = 1 / (1 + math.exp(-cut))
        decided = with_threshold(np.stack([np.zeros(2001), odds], axis=1), threshold).argmax(axis=1)
        assert (decided == (odds > math.log(threshold / (1 - threshold)))).all()


def test_metrics_of_rows_of_several_ranks_are_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 90)
    logits = np.round(generator.normal(size=(90, 3)) + 2 * np.eye(3)[labels], 1)
    ranks = [JudgedRows(3), JudgedRows(3)]
    for rank, rows in zip(ranks, (slice(0, 50), slice(50, 90)), strict=True):
        rank.add(logits[rows], labels[rows])
    found = together(ranks).metrics(None)
    assert found["f1"] == pytest.approx(f1_score(labels, logits.argmax(axis=1), average="macro"))
    assert found["accuracy"] == pytest.approx(np.mean(logits.argmax(axis=1) == labels)) and found["auc"] is None
    two = (labels == 1).astype(int)
    assert area_under_curve(logits[:, 1], two) == pytest.approx(roc_auc_score(two, logits[:, 1]), rel=1e-12)


@pytest.mark.parametrize("metric", first_few(["auc", "f1", "accuracy"]))
def test_the_best_weights_and_the_end_follow_the_metric(metric: str, tmp_path: Path) -> None:
    prepared = table(tmp_path / "prepared")
    model = trained(prepared, tmp_path / "training", epochs=6, metric=metric, learning_rate=0.02, seed=3)
    history = model.history
    values = [getattr(point, metric) for point in history.evaluations]
    assert getattr(history.best, metric) == max(values) and history.metric == metric
    assert history.best == history.evaluations[values.index(max(values))]
    records = PreparedData.open(prepared).split("validation")
    outputs, labels = decided_outputs(model, records).astype(float), records[TARGET]
    expected = {
        "auc": roc_auc_score(labels, outputs[:, 1] - outputs[:, 0]),
        "f1": f1_score(labels, outputs.argmax(axis=1), average="macro"),
        "accuracy": np.mean(labels == outputs.argmax(axis=1)),
    }
    assert max(values) == pytest.approx(expected[metric], abs=1e-6)


@pytest.mark.prove
def test_the_threshold_of_the_best_weights_is_kept_on_any_number_of_processes(tmp_path: Path) -> None:
    prepared, settings = table(tmp_path / "prepared"), {"threshold": "cost", "error_costs": {"yes": 6.0}}
    one, two = (trained(prepared, tmp_path / f"on {n}", n, epochs=8, learning_rate=0.02, **settings) for n in (1, 2))
    assert one.threshold is not None and one.threshold < 0.4
    assert one.threshold == pytest.approx(two.threshold, abs=1e-4)
    assert one.history.rule == ThresholdRule((1.0, 6.0))


def test_a_training_without_these_settings_writes_the_history_of_before(tmp_path: Path) -> None:
    trained(table(tmp_path / "prepared"), tmp_path / "training", epochs=1)
    history = json.loads((tmp_path / "training/model/history.json").read_text())
    assert {"metric", "rule"}.isdisjoint(history) and {"auc", "f1", "threshold"}.isdisjoint(history["best"])
    assert history["best"].keys() == {"step", "epoch", "loss", "accuracy", "rmse", "train_loss"}


@pytest.mark.parametrize(
    ("classes", "settings", "message"),
    [
        (
            CLASSES,
            {"metric": "rmse"},
            r'training\.metric: "rmse" is not allowed; expected one of loss, accuracy, f1, auc',
        ),
        (("a", "b", "c"), {"metric": "auc"}, r'training\.metric: "auc" .* for 3 classes'),
        ((), {"metric": "f1"}, r'training\.metric: "f1" .* one of loss, rmse for regression'),
        (("a", "b", "c"), {"threshold": "f1"}, r"training\.threshold: .* two classes"),
        ((), {"balance_classes": True}, r"training\.balance_classes: true .* no classes"),
        (CLASSES, {"class_weights": {"maybe": 2.0}}, r"training\.class_weights: 'maybe' is not a class .* 'no', 'yes'"),
    ],
)
def test_settings_that_the_data_do_not_have_are_refused(
    classes: tuple[str, ...], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        check_training(
            table(tmp_path / "prepared", classes),
            SMALL,
            TrainingConfig(batch_size=40, **settings),
            processes=1,
            nodes=1,
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": "cost"},
        {"error_costs": {"yes": 2.0}},
        {"balance_classes": True, "class_weights": {"yes": 2.0}},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^training\."):
        TrainingConfig(**settings)
