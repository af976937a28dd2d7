"""Metrics: pure functions of predictions and targets, computed in float64.

Evaluation and export score with the same functions, so that their figures can be compared.
scikit-learn is only imported where a curve or a rank statistic is needed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np

from slipstream.artifacts.results.evaluation import CalibrationBin, RocCurve, Scores
from slipstream.models import shares

#: Of confidence: at most so many, each with at least so many rows.
BINS, FEWEST = 15, 20
CURVE_POINTS = 200
#: The metric by which models are compared, and whether larger is better.
HEADLINE: dict[str, tuple[Literal["accuracy", "rmse"], bool]] = {
    "classification": ("accuracy", True),
    "regression": ("rmse", False),
    "next token": ("accuracy", True),
}
#: Smaller probabilities are raised to this one, so that a single row cannot make the log loss infinite.
SMALLEST_PROBABILITY = 1e-15


def softmax(logits: np.ndarray) -> np.ndarray:
    """Logits ``[rows, classes]`` of any float dtype to probabilities, float64, same shape."""
    logits = logits.astype(np.float64)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def scores(task: str, outputs: np.ndarray, targets: np.ndarray) -> Scores:
    """The metrics of a model's raw ``outputs``: logits ``[rows, classes]``, or values ``[rows, 1]`` in target units; or
    what :func:`slipstream.models.predict.graded` gives, of which the means over all learned tokens are told."""
    if task == "next token":
        right, likelihood = outputs.reshape(-1, 2).sum(axis=0, dtype=np.float64) / np.count_nonzero(targets >= 0)
        return Scores(accuracy=float(right), log_loss=float(-likelihood))
    if task == "classification":
        return classification_scores(softmax(outputs), targets)
    return regression_scores(outputs[:, 0], targets)


def classification_scores(probabilities: np.ndarray, labels: np.ndarray) -> Scores:
    """Accuracy, log loss (nats), macro F1, expected calibration error and, for two classes, ROC AUC.

    ``probabilities`` is ``[rows, classes]``, ``labels`` ``[rows]`` of int. The AUC is None if only one class occurs.
    """
    of_truth = probabilities[np.arange(len(labels)), labels]
    return Scores(
        accuracy=float(np.mean(probabilities.argmax(axis=1) == labels)),
        log_loss=float(-np.mean(np.log(np.maximum(of_truth, SMALLEST_PROBABILITY)))),
        macro_f1=macro_f1(confusion_matrix(probabilities, labels)),
        ece=calibration_error(calibration_bins(probabilities, labels)),
        roc_auc=roc_auc(probabilities[:, 1], labels) if probabilities.shape[1] == 2 else None,
    )


def regression_scores(predictions: np.ndarray, targets: np.ndarray) -> Scores:
    """RMSE and MAE in units of the target, and R² (None if the targets do not vary). Both arrays are ``[rows]``."""
    targets = targets.astype(np.float64)
    errors = predictions.astype(np.float64) - targets
    spread = float(np.sum((targets - targets.mean()) ** 2))
    return Scores(
        rmse=float(np.sqrt(np.mean(errors**2))),
        mae=float(np.mean(np.abs(errors))),
        r2=1 - float(np.sum(errors**2)) / spread if spread > 0 else None,
    )


def confusion_matrix(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Counts ``[classes, classes]``, int64: the row is the truth, the column the most probable class."""
    classes = probabilities.shape[1]
    cells = labels.astype(np.int64) * classes + probabilities.argmax(axis=1)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def macro_f1(confusion: np.ndarray) -> float:
    """The mean F1 of the classes that occur in truth or prediction."""
    hits = np.diagonal(confusion)
    occurrences = confusion.sum(axis=0) + confusion.sum(axis=1)
    occurs = occurrences > 0
    return float(np.mean(2 * hits[occurs] / occurrences[occurs]))


def calibration_bins(probabilities: np.ndarray, labels: np.ndarray) -> list[CalibrationBin]:
    """Accuracy by confidence (the probability of the most probable class), in bins of about equally many rows.

    Bins of equal width leave single rows in some, whose accuracy is 0 or 1 (Nixon et al., "Measuring Calibration in
    Deep Learning", 2019). Rows of equal confidence share a bin. Intervals of the accuracy are Clopper and Pearson's.
    """
    order = np.argsort(probabilities.max(axis=1), kind="stable")
    confidence = probabilities.max(axis=1)[order]
    right = (probabilities.argmax(axis=1) == labels)[order]
    found, above = list[CalibrationBin](), 0.0
    for start, end in pairwise(bin_edges(confidence)):
        rows, hits, to = end - start, int(right[start:end].sum()), float(confidence[end - 1])
        found.append(
            CalibrationBin(
                above=above,
                to=to,
                rows=rows,
                confidence=float(confidence[start:end].mean()),
                accuracy=hits / rows,
                low=float(shares.lower_limit(hits, rows, 0.025)),
                high=float(shares.upper_limit(hits, rows, 0.025)),
            )
        )
        above = to
    return found


def bin_edges(ascending: np.ndarray) -> list[int]:
    """Where bins begin and end, from 0 to the number of rows."""
    rows = len(ascending)
    wanted = np.linspace(0, rows, min(BINS, max(1, rows // FEWEST)) + 1).astype(int)[1:-1]
    edges = [0]
    for end in np.searchsorted(ascending, ascending[wanted - 1], side="right").tolist():
        if end - edges[-1] >= FEWEST and rows - end >= FEWEST:
            edges.append(end)
    return [*edges, rows]


def calibration_error(bins: list[CalibrationBin]) -> float:
    """The expected calibration error of Guo et al., "On Calibration of Modern Neural Networks", 2017, over bins of
    equally many rows instead of equal width."""
    return sum(b.rows * abs(b.accuracy - b.confidence) for b in bins) / sum(b.rows for b in bins)


def roc_auc(positive: np.ndarray, labels: np.ndarray) -> float | None:
    """The area under the ROC curve of the probability of class 1; None if only one class occurs."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, positive)) if len(np.unique(labels)) == 2 else None


def roc_points(positive: np.ndarray, labels: np.ndarray, points: int = CURVE_POINTS) -> RocCurve | None:
    """The ROC curve, thinned to at most ``points`` points; None if only one class occurs."""
    from sklearn.metrics import roc_curve

    if len(np.unique(labels)) < 2:
        return None
    false_positive, true_positive, _ = roc_curve(labels, positive)
    sample = np.unique(np.linspace(0, len(false_positive) - 1, points).round().astype(int))
    return RocCurve(false_positive[sample].tolist(), true_positive[sample].tolist())
