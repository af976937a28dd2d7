"""Baseline: scikit-learn's histogram gradient boosting, trained on the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.evaluation import BaselineScores
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.models.metrics import classification_scores, regression_scores
from slipstream.shared.models.predict import record_targets

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

    ``outputs`` are probabilities ``[rows, classes]``, or ``[rows, 1]`` values in units of the target.
    """

    scores: BaselineScores
    outputs: np.ndarray


def train_baseline(data: PreparedData, test: np.ndarray) -> Baseline:
    """Train on a sample of the training split, within the limits of this module, and predict ``test``.

    Early stopping uses the validation split, as for our model. scikit-learn would hold out training rows by a
    stratified split, which fails for classes with a single row.
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
    settings["early_stopping"] = len(rows) > STOP_EARLY_ABOVE and len(validation) > 0
    if settings["early_stopping"]:
        validation_data = {"X_val": feature_table(signature, validation), "y_val": record_targets(validation)}
    # With a thread per core, one core busy elsewhere makes all others spin: 80 s instead of 3 s were measured.
    with threadpool_limits(max(1, usable_cores() // 2), user_api="openmp"):
        if signature.task == "classification":
            model = HistGradientBoostingClassifier(**settings).fit(x, y, **validation_data)
            outputs = np.zeros((len(test), classes))
            outputs[:, model.classes_] = model.predict_proba(feature_table(signature, test))
            scores = classification_scores(outputs, truth)
        else:
            model = HistGradientBoostingRegressor(**settings).fit(x, y, **validation_data)
            outputs = model.predict(feature_table(signature, test))[:, None]
            scores = regression_scores(outputs[:, 0], truth)
    return Baseline(BaselineScores(name=NAME, rows_trained=len(rows), **vars(scores)), outputs)
