"""Comparison of a model with the baseline of its evaluation, in words."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.evaluation import BINARY, Evaluation


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


#: Share of the most frequent class above which accuracy alone says little.
UNBALANCED = 0.5


@dataclass(frozen=True)
class AgainstBaseline:
    """Difference between the model's metric and the baseline's, as text.

    ``shown`` is 1 if the model is significantly better, -1 if significantly worse, else 0.
    """

    words: str
    interval: str
    shown: int

    @property
    def sentence(self) -> str:
        """Difference, interval and significance as half a sentence."""
        return f"{self.words}, {self.interval}" if self.shown else f"not significant: {self.words}, {self.interval}"


def unbalanced_figures(evaluation: Evaluation) -> str:
    """Return what qualifies the accuracy for two or unbalanced classes, in words; else ""."""
    majority, binary = evaluation.majority, len(evaluation.classes) == 2
    if majority is None or not (binary or majority > UNBALANCED):
        return ""
    named = [(fmt.NAMES[name], evaluation.model.of(name)) for name in BINARY if binary]
    parts = [f"{name} {fmt.UNKNOWN if value is None else f'{value:.3f}'}" for name, value in named]
    return ", ".join([*parts, f"majority baseline {fmt.metric('accuracy', majority)}"])


def references(evaluation: Evaluation) -> str:
    """Return the figures of the other references for text, in words."""
    found = evaluation.language.references if evaluation.language else []
    return "; ".join(f"{each.name}: {fmt.metric('bits_per_byte', each.bits_per_byte)}" for each in found)


def against_baseline(evaluation: Evaluation) -> AgainstBaseline | None:
    metric, gain = evaluation.metric.name, evaluation.gain
    if evaluation.baseline.of(metric) is None:
        return None
    better_is_above = metric not in fmt.LESS_IS_BETTER
    unit, digits = fmt.UNITS.get(metric, ("%", 1))
    low, high = (gain.low, gain.high) if gain.value >= 0 else (-gain.high, -gain.low)
    side = "above" if (gain.value >= 0) == better_is_above else "below"
    words = f"{abs(gain.value):.{digits}f} {unit} {side}" if gain.value else "equal"
    return AgainstBaseline(words, f"{fmt.limits(low, high, digits)} with 95 % confidence", gain.shown)
