"""Scoring the trained model on the test split, beside a baseline trained on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.artifacts.format import Artifact, ArtifactWriter
from tasks.artifacts.prepared import PreparedData
from tasks.evaluate.baseline import baseline
from tasks.models import metrics
from tasks.models.predict import held_out_rows, predict, targets_of, torch_predictor

if TYPE_CHECKING:
    from tasks.models.trained import TrainedModel

KIND = "evaluate"
SCATTER_POINTS = 500


def evaluate(directory: Path, trained: TrainedModel, data: PreparedData, made_by: Mapping[str, Any]) -> Artifact:
    """Write the artifact ``evaluate``, whose ``evaluation.json`` holds every figure.

    Raises ``UserError`` if the test split is empty or the model's outputs are not finite.
    """
    records = held_out_rows(data)
    outputs = predict(torch_predictor(trained.load()), trained.signature, records)
    truth = targets_of(records)
    name, _ = metrics.HEADLINE[trained.signature.task]
    model = metrics.scores(trained.signature.task, outputs, truth)
    evaluation = {
        "task": trained.signature.task,
        "rows": len(records),
        "metric": {"name": name, "value": model[name]},
        "model": model,
        "baseline": baseline(data, records),
        "classes": list(trained.signature.classes),
        **pictures(trained.signature.task, outputs, truth),
    }
    writer = ArtifactWriter(directory)
    writer.write_json("evaluation.json", evaluation)
    return writer.finish(KIND, made_by)


def pictures(task: str, outputs: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """What the report draws: confusion, calibration and ROC, or actual against predicted values."""
    if task == "regression":
        shown = np.unique(np.linspace(0, len(truth) - 1, SCATTER_POINTS).astype(int))
        return {"scatter": {"actual": truth[shown].tolist(), "predicted": outputs[shown, 0].tolist()}}
    probabilities = metrics.softmax(outputs)
    drawn: dict[str, Any] = {
        "confusion": metrics.confusion_matrix(probabilities, truth).tolist(),
        "calibration": metrics.calibration_bins(probabilities, truth),
    }
    if probabilities.shape[1] == 2:
        drawn["roc"] = metrics.roc_points(probabilities[:, 1], truth)
    return drawn
