"""Drift between scored rows and training rows, by counts in the bins of the model's package.

An alarm needs an index above the threshold that is also significant: without drift, at most 1 % of runs show one in any
column. See :mod:`slipstream.shared.comparison.stability`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from slipstream.pipeline.score.predict import Predictions
from slipstream.shared.artifacts.results.distributions import Bins, Distributions
from slipstream.shared.artifacts.results.scoring import DriftFigures, Stability
from slipstream.shared.comparison.bins import count_numbers, count_predictions, count_texts
from slipstream.shared.comparison.stability import ENOUGH, DriftTest, drift_test, significant_drifts
from slipstream.shared.source.columns import value_types

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
