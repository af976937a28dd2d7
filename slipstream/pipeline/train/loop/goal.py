"""Goal of a training: the validation metric that it optimises, the weights of classes, and the decision threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.card import CARD
from slipstream.shared.artifacts.prepared.data import TARGET, WEIGHT, PreparedData, Signature
from slipstream.shared.artifacts.results.training import ThresholdRule
from slipstream.shared.errors import UserError
from slipstream.shared.models.decision import (
    area_under_curve,
    choose_threshold,
    count_decisions,
    log_odds,
    macro_f1,
    margins,
)

#: Metrics of a task; two classes also have "auc".
METRICS = {
    "classification": ("loss", "accuracy", "f1"),
    "regression": ("loss", "rmse"),
    "next token": ("loss", "accuracy"),
}
#: Largest number of training rows whose weights are summed by class.
SAMPLED = 200_000


@dataclass(frozen=True)
class ValidationGoal:
    """Metric and threshold rule of the evaluations."""

    metric: str = "loss"
    rule: ThresholdRule | None = None

    @classmethod
    def of(cls, training: TrainingConfig, signature: Signature) -> ValidationGoal:
        if training.threshold == "none":
            return cls(training.metric)
        if training.threshold == "f1":
            return cls(training.metric, ThresholdRule(None))
        first, second = by_class(training.error_costs, signature)
        return cls(training.metric, ThresholdRule((first, second)))

    @property
    def needs_rows(self) -> bool:
        """True if the evaluation needs every row's outputs, and not only sums over rows."""
        return self.rule is not None or self.metric in ("auc", "f1")


@dataclass(frozen=True)
class JudgedRows:
    """Labels of rows, and what decides them: log odds of two classes, else the decisions."""

    classes: int
    answers: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)

    def add(self, logits: np.ndarray, labels: np.ndarray) -> None:
        self.answers.append(margins(logits) if self.classes == 2 else logits.argmax(axis=1))
        self.labels.append(labels)

    def metrics(self, rule: ThresholdRule | None) -> dict[str, float | None]:
        """Return accuracy and macro F1 of the decisions, and of two classes the AUC and the threshold."""
        answers, labels = np.concatenate(self.answers), np.concatenate(self.labels)
        threshold, auc = None, None
        if self.classes == 2:
            cut = 0.0
            if rule:
                threshold = choose_threshold(rule, answers, labels)
                cut = log_odds(threshold)
            auc = area_under_curve(answers, labels) if 0 < labels.sum() < len(labels) else None
            answers = (answers > cut).astype(np.int64)
        f1 = macro_f1(count_decisions(answers, labels, self.classes))
        return {"accuracy": float(np.mean(answers == labels)), "f1": f1, "auc": auc, "threshold": threshold}


def together(ranks: Sequence[JudgedRows]) -> JudgedRows:
    """Return the rows of all ranks."""
    return JudgedRows(
        ranks[0].classes,
        [part for each in ranks for part in each.answers],
        [part for each in ranks for part in each.labels],
    )


def by_class(given: Mapping[str, float], signature: Signature) -> tuple[float, ...]:
    return tuple(given.get(name, 1.0) for name in signature.classes)


def class_rows(data: PreparedData, split: str) -> np.ndarray:
    """Return the number of rows of every class in a split, from the data card if there is one."""
    classes = data.signature.classes
    if CARD in data.artifact.files:
        counted = data.card["classes"]
        return np.array([counted[name][split] for name in classes])
    return np.bincount(np.array(data.split(split)[TARGET]), minlength=len(classes))


def class_weights(training: TrainingConfig, data: PreparedData) -> np.ndarray | None:
    """Return the weights of the classes in the loss, float32.

    Multiplied by the rows' own weights, their mean over the training rows is 1.
    """
    if not (training.balance_classes or training.class_weights):
        return None
    totals = class_totals(data)
    if training.balance_classes:
        return (totals.sum() / (len(totals) * np.where(totals > 0, totals, 1))).astype(np.float32)
    weights = np.array(by_class(training.class_weights, data.signature))
    return (weights * totals.sum() / (weights * totals).sum()).astype(np.float32)


def class_totals(data: PreparedData) -> np.ndarray:
    """Return the sum of the training rows' weights by class; from at most :data:`SAMPLED` rows if they have any."""
    rows = class_rows(data, "train")
    if not data.signature.weight:
        return rows
    records = data.sample("train", SAMPLED)
    counts, sums = (np.bincount(records[TARGET], each, len(rows)) for each in (None, records[WEIGHT]))
    return rows * np.divide(sums, counts, where=counts > 0, out=np.ones(len(rows)))


def check_goal(training: TrainingConfig, data: PreparedData) -> None:
    """Raise ``UserError`` if the data do not have the metric, the classes or the threshold."""
    signature = data.signature
    classes = signature.classes
    metrics = (*METRICS[signature.task], *(("auc",) if len(classes) == 2 else ()))
    if training.metric not in metrics:
        kind = f"{len(classes)} classes" if classes else signature.task
        raise training.reject("metric", f"one of {', '.join(metrics)} for {kind}")
    if training.threshold != "none" and len(classes) != 2:
        raise training.reject("threshold", "none: only data with two classes have a threshold")
    if training.balance_classes and not classes:
        raise training.reject("balance_classes", f"false for {signature.task}, which has no classes")
    for name in ("class_weights", "error_costs"):
        if odd := next((each for each in getattr(training, name) if each not in classes), None):
            known = ", ".join(map(repr, classes)) or f"none for {signature.task}"
            raise UserError(f"training.{name}: {odd!r} is not a class of the data; expected {known}")
    if (training.metric == "auc" or training.threshold != "none") and not class_rows(data, "validation").all():
        setting = "metric" if training.metric == "auc" else "threshold"
        raise training.reject(setting, "validation rows of both classes; give more rows or raise data.split.validation")
