"""Metrics and exact limits of proportions: pure functions of predictions and targets, computed in float64.

Evaluation and export share them, so that figures are comparable. scikit-learn is only imported for a curve or a rank
statistic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from slipstream.shared.artifacts.results.evaluation import CalibrationBin, PrecisionRecall, RocCurve, Scores
from slipstream.shared.models.decision import count_decisions, macro_f1, with_threshold

#: Maximum number of confidence bins, and minimum number of rows in a bin. Bins of equal width could have single rows,
#: whose accuracy is 0 or 1 (Nixon et al., "Measuring Calibration in Deep Learning", 2019).
BINS, FEWEST = 15, 20
CURVE_POINTS = 200
#: Metric by which models of a task are compared, and whether a larger value is better.
HEADLINE: dict[str, tuple[Literal["accuracy", "rmse"], bool]] = {
    "classification": ("accuracy", True),
    "regression": ("rmse", False),
    "next token": ("accuracy", True),
}
#: Lower bound of probabilities in the log loss, so that a single row cannot make it infinite.
SMALLEST_PROBABILITY = 1e-15


def softmax(logits: np.ndarray) -> np.ndarray:
    """Convert logits ``[rows, classes]`` of any float dtype to probabilities, float64, same shape."""
    logits = logits.astype(np.float64)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def compute_scores(task: str, outputs: np.ndarray, targets: np.ndarray, threshold: float | None = None) -> Scores:
    """Compute the metrics of a model's raw ``outputs``, with decisions by ``threshold``.

    These are logits ``[rows, classes]``, or values ``[rows, 1]`` in target units. For tokens they are the results of
    :func:`slipstream.shared.models.predict.grade_tokens`, averaged over all learned tokens.
    """
    if task == "next token":
        right, likelihood = outputs.reshape(-1, 2).sum(axis=0, dtype=np.float64) / np.count_nonzero(targets >= 0)
        return Scores(accuracy=float(right), log_loss=float(-likelihood))
    if task == "classification":
        return classification_scores(softmax(outputs), targets, with_threshold(outputs, threshold).argmax(axis=1))
    return regression_scores(outputs[:, 0], targets)


def classification_scores(probabilities: np.ndarray, labels: np.ndarray, decisions: np.ndarray | None = None) -> Scores:
    """Compute accuracy, log loss (nats), macro F1, expected calibration error and, for two classes, rank statistics.

    ``probabilities`` is ``[rows, classes]``, ``labels`` and ``decisions`` (by default the likeliest classes) are
    ``[rows]`` of int. ROC AUC and average precision (of the rarer
    class) are None if only one class occurs.
    """
    binary = probabilities.shape[1] == 2
    decisions = probabilities.argmax(axis=1) if decisions is None else decisions
    of_truth = probabilities[np.arange(len(labels)), labels]
    return Scores(
        accuracy=float(np.mean(decisions == labels)),
        log_loss=float(-np.mean(np.log(np.maximum(of_truth, SMALLEST_PROBABILITY)))),
        macro_f1=macro_f1(count_decisions(decisions, labels, probabilities.shape[1])),
        ece=calibration_error(calibration_bins(probabilities, labels)),
        roc_auc=roc_auc(probabilities[:, 1], labels) if binary else None,
        average_precision=average_precision(probabilities, labels) if binary else None,
    )


def regression_scores(predictions: np.ndarray, targets: np.ndarray) -> Scores:
    """Compute RMSE and MAE in units of the target, and R² (None if the targets do not vary).

    Both arrays are ``[rows]``.
    """
    targets = targets.astype(np.float64)
    errors = predictions.astype(np.float64) - targets
    spread = float(np.sum((targets - targets.mean()) ** 2))
    return Scores(
        rmse=float(np.sqrt(np.mean(errors**2))),
        mae=float(np.mean(np.abs(errors))),
        r2=1 - float(np.sum(errors**2)) / spread if spread > 0 else None,
    )


def calibration_bins(probabilities: np.ndarray, labels: np.ndarray) -> list[CalibrationBin]:
    """Return accuracy by confidence (the largest probability), in bins of similar row counts.

    Rows of equal confidence share a bin. The accuracy's confidence intervals are Clopper-Pearson's.
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
                low=float(lower_limit(hits, rows, 0.025)),
                high=float(upper_limit(hits, rows, 0.025)),
            )
        )
        above = to
    return found


def bin_edges(ascending: np.ndarray) -> list[int]:
    """Return the bins' boundaries as row indices, from 0 to the number of rows.

    ``ascending`` holds sorted confidences.
    """
    rows = len(ascending)
    wanted = np.linspace(0, rows, min(BINS, max(1, rows // FEWEST)) + 1).astype(int)[1:-1]
    edges = [0]
    for end in np.searchsorted(ascending, ascending[wanted - 1], side="right").tolist():
        if end - edges[-1] >= FEWEST and rows - end >= FEWEST:
            edges.append(end)
    return [*edges, rows]


def calibration_error(bins: list[CalibrationBin]) -> float:
    """Return the expected calibration error over bins of equally many rows.

    Guo et al., "On Calibration of Modern Neural Networks", 2017, use bins of equal width.
    """
    return sum(b.rows * abs(b.accuracy - b.confidence) for b in bins) / sum(b.rows for b in bins)


def roc_auc(positive: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the area under the ROC curve for class 1; None if only one class occurs."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, positive)) if len(np.unique(labels)) == 2 else None


def average_precision(probabilities: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the average precision for the rarer of two classes; None if only one class occurs."""
    from sklearn.metrics import average_precision_score

    if len(np.unique(labels)) < 2:
        return None
    rarer = int(np.mean(labels == 1) <= 0.5)
    return float(average_precision_score(labels == rarer, probabilities[:, rarer]))


def roc_points(positive: np.ndarray, labels: np.ndarray, points: int = CURVE_POINTS) -> RocCurve | None:
    """Return at most ``points`` points of the ROC curve for class 1; None if only one class occurs."""
    from sklearn.metrics import roc_curve

    if len(np.unique(labels)) < 2:
        return None
    false_positive, true_positive, _ = roc_curve(labels, positive)
    sample = np.unique(np.linspace(0, len(false_positive) - 1, points).round().astype(int))
    return RocCurve(false_positive[sample].tolist(), true_positive[sample].tolist())


def precision_recall_points(
    probabilities: np.ndarray, labels: np.ndarray, classes: Sequence[str], points: int = CURVE_POINTS
) -> PrecisionRecall | None:
    """Return at most ``points`` points of the curve for the rarer of two classes; None if only one class occurs."""
    from sklearn.metrics import precision_recall_curve

    if len(np.unique(labels)) < 2:
        return None
    rarer = int(np.mean(labels == 1) <= 0.5)
    precision, recall, _ = precision_recall_curve(labels == rarer, probabilities[:, rarer])
    sample = np.unique(np.linspace(0, len(recall) - 1, points).round().astype(int))[::-1]
    return PrecisionRecall(
        recall[sample].tolist(), precision[sample].tolist(), classes[rarer], float(np.mean(labels == rarer))
    )


# "The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial", Biometrika 26, 1934.
def upper_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """Return the upper confidence limit of a proportion, after ``hits`` in ``rows`` draws.

    The true proportion exceeds it with probability at most ``error``.
    """
    from scipy.stats import beta

    hits = np.asarray(hits, float)
    others = np.maximum(rows - hits, 1e-9)  # avoids 0, for which the limit is 1 anyway
    return np.where(hits < rows, beta.ppf(1 - error, hits + 1, others), 1.0)


def lower_limit(hits: ArrayLike, rows: int, error: float) -> np.ndarray:
    """Return the lower confidence limit, with arguments as in :func:`upper_limit`."""
    return 1 - upper_limit(rows - np.asarray(hits, float), rows, error)
