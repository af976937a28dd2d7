"""Predictions for batches of rows by single-threaded ONNX Runtime sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.export.session import session_on, session_options
from slipstream.pipeline.score.model import RAW, ServedModel
from slipstream.shared.artifacts.results.export import RawSignature
from slipstream.shared.artifacts.results.scoring import Bins, Distributions, DriftFigures, Stability
from slipstream.shared.comparison.stability import (
    ENOUGH,
    DriftTest,
    count_numbers,
    count_predictions,
    count_texts,
    drift_test,
    significant_drifts,
)
from slipstream.shared.models.decision import with_threshold
from slipstream.shared.models.predict import record_inputs
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.transform import Transform

if TYPE_CHECKING:
    import onnxruntime

#: Rows per call; their intermediate results fit into the processor's cache.
BATCH_ROWS = 2048


@dataclass(frozen=True)
class Predictions:
    """Predictions for some rows.

    ``labels`` are texts, with probabilities as ``outputs``, float32 ``[rows, classes]``. A regression has no labels,
    and values ``[rows, 1]``, float64 (float32 from older packages).
    """

    labels: pa.Array | None
    outputs: np.ndarray


#: Function that predicts from columns.
TablePredictor = Callable[[pa.RecordBatch], Predictions]


def table_predictor(model: ServedModel) -> TablePredictor:
    if model.by == RAW:
        columns, raw = read_columns(model.statistics), model.signature.raw
        assert isinstance(columns, RawColumns) and raw, "a model that takes raw columns says which"
        return RawPredictor(open_session(model.directory / raw.model), columns, raw)
    return PreparedPredictor(TensorPredictor.of(model), model.transform)


def open_session(path: Path) -> onnxruntime.InferenceSession:
    options = session_options(1)
    # Memory patterns are cached for every call size, and every file ends with another size.
    options.enable_mem_pattern = False
    return session_on(path, options, "cpu")


@dataclass(frozen=True)
class RawPredictor:
    session: onnxruntime.InferenceSession
    columns: RawColumns
    signature: RawSignature
    _texts: dict[str, tuple[pa.Array, np.ndarray]] = field(default_factory=dict)

    def __call__(self, rows: pa.RecordBatch) -> Predictions:
        feed = {
            given.name: self.column(rows.column(name), name, kind)[:, None]
            for given, (name, kind) in zip(self.signature.inputs, self.columns.types.items(), strict=True)
        }
        names = [output.name for output in self.signature.outputs]
        *labels, outputs = in_calls(lambda part: self.session.run(names, part), feed, rows.num_rows)
        return Predictions(pa.array(labels[0][:, 0], pa.string()) if labels else None, outputs)

    def column(self, values: pa.Array, name: str, kind: str) -> np.ndarray:
        """Return float64 ``[rows]`` with NaN for missing values, or texts."""
        if kind != value_types.TEXT:
            return value_types.as_numbers(values)
        coded = value_types.with_dictionary(values)
        known, table = self._texts.get(name, (None, None))
        if table is None or not coded.dictionary.equals(known):
            table = self.spelled(coded.dictionary)
            self._texts[name] = (coded.dictionary, table)
        return table.take(value_types.dictionary_codes(coded))

    def spelled(self, texts: pa.Array) -> np.ndarray:
        """Return every text as the model expects it, and last the text for missing values."""
        clean = value_types.clean_texts(texts.cast(pa.string()), list(self.columns.missing))
        return np.array(
            [*(self.columns.mark if text is None else text for text in clean.to_pylist()), self.columns.mark], object
        )


@dataclass(frozen=True)
class TensorPredictor:
    """Predictor that takes tensors; the model's outputs are logits or values."""

    session: onnxruntime.InferenceSession
    inputs: list[str]
    classes: list[str]
    threshold: float | None

    @classmethod
    def of(cls, model: ServedModel) -> TensorPredictor:
        signature = model.signature
        names = [given.name for given in signature.inputs]
        return cls(open_session(signature.onnx(model.directory)), names, signature.classes, signature.threshold)

    def __call__(self, tensors: dict[str, np.ndarray]) -> Predictions:
        rows = len(next(iter(tensors.values())))
        (outputs,) = in_calls(lambda part: self.session.run(None, part), tensors, rows)
        if not self.classes:
            return Predictions(None, outputs.reshape(rows, 1))
        decisions = with_threshold(outputs, self.threshold).argmax(axis=1)
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        best = pa.DictionaryArray.from_arrays(decisions, pa.array(self.classes, pa.string()))
        return Predictions(best.cast(pa.string()), powers / powers.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class PreparedPredictor:
    """Predictor that first applies the package's preparation."""

    tensors: TensorPredictor
    transform: Transform

    def __call__(self, rows: pa.RecordBatch) -> Predictions:
        signature = self.transform.signature
        records = np.zeros(rows.num_rows, signature.record)
        self.transform.encode(rows, records)
        return self.tensors(dict(zip(self.tensors.inputs, record_inputs(signature, records), strict=True)))


def in_calls(
    run: Callable[[dict[str, np.ndarray]], list[np.ndarray]], feed: dict[str, np.ndarray], rows: int
) -> list[np.ndarray]:
    """Return the outputs of ``run`` for all rows, computed in batches."""
    parts = [
        run({name: values[start : start + BATCH_ROWS] for name, values in feed.items()})
        for start in range(0, max(rows, 1), BATCH_ROWS)
    ]
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


# An alarm needs an index above the threshold that is also significant: without drift, at most 1 % of runs show one in
# any column. See :mod:`slipstream.shared.comparison.stability`.
PREDICTIONS = "predictions"
#: Prefix of raw columns in counts, so that no column collides with ``PREDICTIONS``.
COLUMN = "column "
NOT_SAID = "the model was exported by a version that did not store the distributions of its training rows"


@dataclass
class BinCounter:
    """Counter of scored rows by bin: int64 ``[bins]`` per column, and for the predictions."""

    distributions: Distributions
    classes: Sequence[str]
    missing: Sequence[str]
    counts: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, rows: pa.RecordBatch | None, predicted: Predictions) -> None:
        for name, bins in self.distributions.columns.items():
            if rows is not None:
                self._add(COLUMN + name, self._of_column(bins, rows.column(name)))
        self._add(PREDICTIONS, count_predictions(self.distributions.predictions, predicted.outputs, self.classes))

    def _add(self, key: str, counts: np.ndarray) -> None:
        self.counts[key] = counts + self.counts[key] if key in self.counts else counts

    def _of_column(self, bins: Bins, column: pa.Array) -> np.ndarray:
        if value_types.column_type(column.type) != value_types.TEXT:
            return count_numbers(bins, value_types.as_numbers(column))
        coded = value_types.with_dictionary(column)
        clean = value_types.clean_texts(coded.dictionary.cast(pa.string()), list(self.missing))
        return count_texts(bins, pa.DictionaryArray.from_arrays(coded.indices, clean))


def measure_drift(distributions: Distributions | None, counts: dict[str, np.ndarray], threshold: float) -> DriftFigures:
    """Compare the counted rows with the training rows; drift is unknown without ``distributions``."""
    if distributions is None:
        return DriftFigures(NOT_SAID, threshold, [])
    before = {COLUMN + name: bins for name, bins in distributions.columns.items()}
    before[PREDICTIONS] = distributions.predictions
    measured = {name: of_counts(bins, counts[name]) for name, bins in before.items() if name in counts}
    known = {name: each for name, each in measured.items() if each is not None}
    alarms = significant_drifts(known, threshold)
    listed = [
        Stability(
            name.removeprefix(COLUMN) if name != PREDICTIONS else PREDICTIONS,
            each.index if each else None,
            each.chance if each else None,
            name in alarms,
        )
        for name, each in sorted(
            measured.items(), key=lambda pair: (pair[0] != PREDICTIONS, -(pair[1].index if pair[1] else 0), pair[0])
        )
    ]
    return DriftFigures("", threshold, listed)


def of_counts(bins: Bins, counts: np.ndarray) -> DriftTest | None:
    """Return the drift; None if there are too few scored or training rows."""
    before = np.array(bins.counts, float)
    if min(before.sum(), counts.sum()) < ENOUGH:
        return None
    return drift_test(before, counts.astype(float), bins.ordered)
