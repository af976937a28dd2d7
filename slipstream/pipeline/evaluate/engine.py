"""Scoring of the trained model on the test split, compared with a baseline trained on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slipstream.pipeline.evaluate.explain import (
    DESCRIBED,
    column_importance,
    row_values,
    table_transform,
    worst_errors,
)
from slipstream.pipeline.evaluate.language import (
    DocumentGrades,
    LanguageScores,
    evaluate_language,
    graded_documents,
    held_out_documents,
)
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.prepared.documents import has_documents
from slipstream.shared.artifacts.results.evaluation import (
    BaselineScores,
    Evaluation,
    Gain,
    Headline,
    PlotData,
    Scatter,
    write_evaluation,
)
from slipstream.shared.artifacts.results.training import ThresholdRule
from slipstream.shared.comparison.quality import quality_loss
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.models import metrics
from slipstream.shared.models.decision import choose_threshold, count_decisions, margins, with_threshold
from slipstream.shared.models.metrics import classification_scores, regression_scores
from slipstream.shared.models.predict import (
    ModelFunction,
    held_out_rows,
    model_function,
    predict_records,
    record_targets,
)

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
    model = trained.load()
    run, parameters = model_function(model), sum(each.numel() for each in model.parameters())
    records = held_out_rows(data)
    outputs = predict_records(run, trained.signature, records)
    truth = record_targets(records)
    name, _ = metrics.HEADLINE[task]
    threshold = trained.threshold
    scores = metrics.compute_scores(task, outputs, truth, threshold)
    beside = train_baseline(data, records, trained.history.rule if threshold is not None else None)
    decided = with_threshold(outputs, threshold)
    evaluation = Evaluation(
        task=task,
        rows=len(records),
        metric=Headline(name, cast(float, scores.of(name))),
        model=scores,
        baseline=beside.scores,
        gain=gain_over(beside.outputs, decided, task, truth),
        classes=list(trained.signature.classes),
        majority=beside.majority,
        threshold=threshold,
        **vars(plot_data(task, outputs, truth, threshold, trained.signature.classes)),
        **explanation(run, parameters, trained, data, records, outputs),
    )
    return write_evaluation(directory, evaluation, made_by)


def explanation(
    run: ModelFunction,
    parameters: int,
    trained: TrainedModel,
    data: PreparedData,
    records: np.ndarray,
    outputs: np.ndarray,
) -> dict[str, Any]:
    """Return the fields of :class:`Evaluation` that explain the figures: importance of columns, and worst errors."""
    signature, threshold, transform = trained.signature, trained.threshold, table_transform(data)
    important = None
    if transform:
        important = column_importance(run, signature, transform, records, parameters, threshold)
    names = [each.name for each in (important or [])[:DESCRIBED]]

    def describe(row: int) -> dict[str, str]:
        return row_values(transform, records[row], names) if transform else {}

    return {"importance": important, "worst": worst_errors(signature, outputs, records, threshold, describe)}


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


def plot_data(
    task: str,
    outputs: np.ndarray,
    truth: np.ndarray,
    threshold: float | None = None,
    classes: Sequence[str] = (),
) -> PlotData:
    """Return the data of the report's plots.

    Classification has a confusion matrix, reliability diagram, ROC and PR curve, regression actual against predicted
    values.
    """
    if task == "regression":
        sample = np.unique(np.linspace(0, len(truth) - 1, SCATTER_POINTS).astype(int))
        return PlotData(scatter=Scatter(truth[sample].tolist(), outputs[sample, 0].tolist()))
    probabilities, decisions = metrics.softmax(outputs), with_threshold(outputs, threshold).argmax(axis=1)
    return PlotData(
        confusion=count_decisions(decisions, truth, probabilities.shape[1]).tolist(),
        calibration=metrics.calibration_bins(probabilities, truth),
        roc=metrics.roc_points(probabilities[:, 1], truth) if probabilities.shape[1] == 2 else None,
        precision_recall=metrics.precision_recall_points(probabilities, truth, classes) if len(classes) == 2 else None,
    )


NAME = "HistGradientBoosting"
#: Limits on the cost of training: rows, pixels of an image, and rows x features x trees per boosting round.
MOST_ROWS = 200_000
MOST_PIXELS = 1024
MOST_CELLS = 20_000_000
FEWEST_ROWS = 1000
WORD_BUCKETS = 256
#: Number of training rows above which boosting stops early, as in scikit-learn.
STOP_EARLY_ABOVE = 10_000
#: Maximum number of categories that scikit-learn splits on directly; with more, frequency ranks are used as numbers.
MOST_CATEGORIES = 255


def feature_table(signature: Signature, records: np.ndarray) -> np.ndarray:
    """Return the inputs as one table, float32 ``[rows, features]``.

    Images keep every k-th line and column, with the smallest k for at most ``MOST_PIXELS``. Texts become counts of
    hashed words.
    """
    named = {spec.name: np.asarray(records[spec.name]) for spec in signature.inputs}
    return np.concatenate(
        [word_counts(values) if name == "tokens" else flatten_inputs(values) for name, values in named.items()], axis=1
    )


def word_counts(tokens: np.ndarray) -> np.ndarray:
    """Count hashed words of int32 ``[rows, columns, length]``, 0 for padding.

    Returns float32 ``[rows, columns * WORD_BUCKETS]``.
    """
    rows, columns, length = tokens.shape
    counts = np.zeros((rows * columns, WORD_BUCKETS), np.float32)
    which = np.repeat(np.arange(rows * columns), length)
    np.add.at(counts, (which, tokens.ravel() % WORD_BUCKETS), (tokens != 0).ravel())
    return counts.reshape(rows, -1)


def flatten_inputs(values: np.ndarray) -> np.ndarray:
    """Return any input but tokens as float32 ``[rows, features]``.

    Images ``[rows, channels, height, width]`` are thinned.
    """
    step = 1
    while values.ndim == 4 and values[:1, :, ::step, ::step].size > MOST_PIXELS and step < max(values.shape[2:]):
        step += 1
    thinned = values[:, :, ::step, ::step] if values.ndim == 4 else values
    return thinned.reshape(len(values), -1).astype(np.float32)


def categorical_columns(signature: Signature) -> list[int]:
    """Return the columns of :func:`feature_table` with few enough categories for boosting to split on directly."""
    start = 0
    for spec in signature.inputs:
        if spec.name == "categorical":
            return [start + i for i, size in enumerate(signature.cardinalities) if size <= MOST_CATEGORIES]
        start += int(np.prod(spec.shape))
    return []


@dataclass(frozen=True)
class Baseline:
    """Scores and predictions of the baseline.

    ``outputs`` are scores ``[rows, classes]`` whose largest is the decision, or ``[rows, 1]`` values in units of the
    target. ``majority`` is the accuracy of always predicting the most frequent class.
    """

    scores: BaselineScores
    outputs: np.ndarray
    majority: float | None


def logarithms(probabilities: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(probabilities, metrics.SMALLEST_PROBABILITY))


def train_baseline(data: PreparedData, test: np.ndarray, rule: ThresholdRule | None = None) -> Baseline:
    """Train on a sample of the training split, within the limits of this module, and predict ``test``.

    Early stopping and the threshold of ``rule`` use the validation split, as for our model.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    signature = data.signature
    classes = len(signature.classes)
    width = feature_table(signature, np.zeros(1, signature.record)).shape[1]
    trees = classes if classes > 2 else 1
    most = min(MOST_ROWS, max(FEWEST_ROWS, MOST_CELLS // (width * trees)))
    rows, validation = data.sample("train", most), data.sample("validation", most)
    x, y, truth = feature_table(signature, rows), record_targets(rows), record_targets(test)
    settings: dict[str, Any] = {"categorical_features": categorical_columns(signature) or None, "random_state": 0}
    if signature.task == "classification":
        validation = validation[np.isin(record_targets(validation), y)]
    validation_data: dict[str, np.ndarray] = {}
    majority = float(np.mean(truth == np.bincount(y).argmax())) if classes else None
    settings["early_stopping"] = len(rows) > STOP_EARLY_ABOVE and len(validation) > 0
    if settings["early_stopping"]:
        validation_data = {"X_val": feature_table(signature, validation), "y_val": record_targets(validation)}
    # With a thread per core, one core busy elsewhere makes all others spin: 80 s instead of 3 s were measured.
    with threadpool_limits(max(1, usable_cores() // 2), user_api="openmp"):
        if signature.task == "classification":
            model = HistGradientBoostingClassifier(**settings).fit(x, y, **validation_data)
            outputs = np.zeros((len(test), classes))
            outputs[:, model.classes_] = model.predict_proba(feature_table(signature, test))
            decided = outputs
            if rule:
                held = logarithms(model.predict_proba(feature_table(signature, validation)))
                threshold = choose_threshold(rule, margins(held), record_targets(validation))
                decided = with_threshold(logarithms(outputs), threshold)
            scores = classification_scores(outputs, truth, decided.argmax(axis=1))
            outputs = decided
        else:
            model = HistGradientBoostingRegressor(**settings).fit(x, y, **validation_data)
            outputs = model.predict(feature_table(signature, test))[:, None]
            scores = regression_scores(outputs[:, 0], truth)
    return Baseline(BaselineScores(name=NAME, rows_trained=len(rows), **vars(scores)), outputs, majority)
