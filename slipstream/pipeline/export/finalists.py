"""Evaluation of the finalists on the test rows, in calls with one row and with many.

Dynamic quantisation takes its scales from all rows of a call, so a row's answer depends on the others. In other
quantised variants it may, if a sum in another order moves a value across a rounding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.pipeline.export.choose import Contender, Variant, rows_together
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import TOLERANCE, largest_difference, rounding_error
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import BatchDependence, LatencyFigures
from slipstream.shared.comparison.quality import QualityLoss, predicted_answers, quality_loss
from slipstream.shared.models.decision import with_threshold
from slipstream.shared.models.predict import predict_records, record_targets

#: Number of rows that are predicted alone; all are if one of these differs, or if scales are dynamic.
ALONE = 5000


@dataclass(frozen=True)
class EvaluatedFinalist:
    """Finalist with the outputs at the worse number of rows per call, and its loss there."""

    variant: Variant
    loss: QualityLoss
    by_batch: BatchDependence | None

    def contender(self, latency: dict[str, LatencyFigures]) -> Contender:
        words = f"; {self.by_batch}" if self.by_batch else ""
        return Contender(self.variant.name, self.variant.bytes, latency, self.loss, words)

    def figures(self, config: ExportConfig) -> dict[str, Any]:
        """Return its fields of ``VariantFigures``."""
        return {"quality": self.loss.figures(config.max_loss, config.evidence), "by_batch": self.by_batch}


def evaluate_finalists(
    fp32: Variant,
    finalists: Sequence[Variant],
    data: PreparedData,
    test: np.ndarray,
    config: ExportConfig,
    threshold: float | None = None,
) -> list[EvaluatedFinalist]:
    """Return every finalist's loss against FP32 on the rows of the splits in ``config.evidence``.

    A finalist whose answers depend on the rows per call has the larger loss of calls with one row and with more.
    """
    task, truth = data.signature.task, record_targets(test)
    validation = data.split("validation") if config.evidence == "test+validation" else test[:0]
    truth = np.concatenate([truth, record_targets(validation)])

    def all_outputs(variant: Variant, rows: int) -> np.ndarray:
        more = [predict_records(variant.load(), data.signature, validation, rows)] if len(validation) else []
        return with_threshold(np.concatenate([variant.outputs, *more]), threshold)

    def evaluated(variant: Variant) -> EvaluatedFinalist:
        versions, by_batch = [(variant, rows)], None
        if (alone := outputs_alone(variant, data, test)) is not None:
            versions.append((replace(variant, outputs=alone), 1))
            by_batch = compare_outputs(task, variant.outputs, alone, rows, threshold)
        losses = [
            (quality_loss(task, truth, before, all_outputs(*each), config.max_loss, len(finalists)), each[0])
            for each in versions
        ]
        loss, worse = max(losses, key=lambda each: each[0].high)
        return EvaluatedFinalist(worse, loss, by_batch)

    rows = rows_together(config)
    before = all_outputs(fp32, rows)
    return [evaluated(each) for each in finalists]


def outputs_alone(variant: Variant, data: PreparedData, test: np.ndarray) -> np.ndarray | None:
    """Return the outputs of calls with one row; None if rounding explains all differences from ``variant.outputs``."""
    run, signature = variant.load(), data.signature
    first = test if variant.dynamic else test[:ALONE]
    alone, together = predict_records(run, signature, first, 1), variant.outputs[: len(first)]
    if largest_difference(together, alone) <= rounding_error(together, signature, TOLERANCE):
        return None
    rest = test[len(first) :]
    return np.concatenate([alone, predict_records(run, signature, rest, 1)]) if len(rest) else alone


def compare_outputs(
    task: str, together: np.ndarray, alone: np.ndarray, rows: int, threshold: float | None
) -> BatchDependence:
    """Return how outputs of calls with ``rows`` rows differ from those of calls with one row."""
    labels = [predicted_answers(task, with_threshold(each, threshold)) for each in (together, alone)]
    different = 0 if task == "regression" else int(np.sum(labels[0] != labels[1]))
    return BatchDependence(rows, different, labels[0].size, largest_difference(together, alone))
