"""Comparison of a model with the baseline of its evaluation, in words."""

from __future__ import annotations

from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.evaluation import Evaluation


def baseline_wins(evaluation: Evaluation) -> str:
    """Return a sentence with the interval if the baseline is significantly better than the model; else ""."""
    gain = evaluation.gain
    if gain.shown >= 0:
        return ""
    unit, digits = fmt.UNITS.get(evaluation.metric.name, ("% of RMSE", 1))
    return (
        f"{evaluation.baseline.name}, the baseline, is better than this model by {-gain.value:.{digits}f} {unit}, "
        f"{fmt.limits(-gain.high, -gain.low, digits)} with 95 % confidence"
    )
