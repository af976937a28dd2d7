"""Scoring of the trained model on the test split, compared with a baseline trained on the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from slipstream.pipeline.evaluate.baseline import train_baseline
from slipstream.pipeline.evaluate.language import (
    DocumentGrades,
    LanguageScores,
    evaluate_language,
    graded_documents,
    held_out_documents,
)
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.token_rows import has_documents
from slipstream.shared.artifacts.results.evaluation import (
    Evaluation,
    Gain,
    Headline,
    PlotData,
    Scatter,
    write_evaluation,
)
from slipstream.shared.comparison.quality import quality_loss
from slipstream.shared.errors import UserError
from slipstream.shared.models import metrics
from slipstream.shared.models.predict import held_out_rows, model_function, predict_records, record_targets

if TYPE_CHECKING:
    from slipstream.shared.models.trained import TrainedModel

SCATTER_POINTS = 500


def evaluate(directory: Path, trained: TrainedModel, data: PreparedData, made_by: Mapping[str, object]) -> Artifact:
    """Write the artifact of :mod:`slipstream.shared.artifacts.results.evaluation` to the fresh ``directory``.

    Raise ``UserError`` if the test split is empty, the outputs are not finite, or tokens lack their documents.
    """
    task, with_documents = trained.signature.task, has_documents(data.artifact)
    if task == "next token" and not with_documents:
        raise UserError(
            "the prepared data have rows of tokens without their documents, so nothing can be compared per byte; "
            "prepare the documents (data.task: language), or run only train and export: docs/transformer.md"
        )
    if with_documents:
        base = of_base(trained, data)
        found = evaluate_language(model_function(trained.load()), data, base)
        return write_evaluation(directory, of_language(found, data), made_by)
    run = model_function(trained.load())
    records = held_out_rows(data)
    outputs = predict_records(run, trained.signature, records)
    truth = record_targets(records)
    name, _ = metrics.HEADLINE[task]
    scores = metrics.compute_scores(task, outputs, truth)
    beside = train_baseline(data, records)
    evaluation = Evaluation(
        task=task,
        rows=len(records),
        metric=Headline(name, cast(float, scores.of(name))),
        model=scores,
        baseline=beside.scores,
        gain=gain_over(beside.outputs, outputs, task, truth),
        classes=list(trained.signature.classes),
        **vars(plot_data(task, outputs, truth)),
    )
    return write_evaluation(directory, evaluation, made_by)


def of_base(trained: TrainedModel, data: PreparedData) -> DocumentGrades | None:
    """Return the base's grades on the held-out documents, before fine-tuning; None without a base.

    The base is freed from memory on return.
    """
    base = trained.load_base()
    return graded_documents(model_function(base), data.signature, held_out_documents(data)) if base else None


def of_language(found: LanguageScores, data: PreparedData) -> Evaluation:
    return Evaluation(
        task=data.signature.task,
        rows=sum(data.segment_rows("test")),
        metric=Headline("bits_per_byte", cast(float, found.model.bits_per_byte)),
        model=found.model,
        baseline=found.baseline,
        gain=found.gain,
        classes=[],
        language=found.figures,
    )


def gain_over(baseline: np.ndarray, model: np.ndarray, task: str, truth: np.ndarray) -> Gain:
    """Return the gain over the baseline, in points of accuracy or % of RMSE, with a two-sided 95 % interval."""
    loss = quality_loss(task, truth, baseline, model, most=0.0, judged=2)
    return Gain(0.0 - loss.loss, 0.0 - loss.high, 0.0 - loss.low)  # and not -0.0


def plot_data(task: str, outputs: np.ndarray, truth: np.ndarray) -> PlotData:
    """Return the data of the report's plots.

    Classification has a confusion matrix, reliability diagram and ROC curve, regression actual against predicted
    values.
    """
    if task == "regression":
        sample = np.unique(np.linspace(0, len(truth) - 1, SCATTER_POINTS).astype(int))
        return PlotData(scatter=Scatter(truth[sample].tolist(), outputs[sample, 0].tolist()))
    probabilities = metrics.softmax(outputs)
    return PlotData(
        confusion=metrics.confusion_matrix(probabilities, truth).tolist(),
        calibration=metrics.calibration_bins(probabilities, truth),
        roc=metrics.roc_points(probabilities[:, 1], truth) if probabilities.shape[1] == 2 else None,
    )
