"""What the test rows say of the model against the baseline, in words."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.artifacts.results.evaluation import Evaluation
from slipstream.report import formatting as fmt


@dataclass(frozen=True)
class AgainstBaseline:
    """How far the metric is above or below the baseline's, its interval, and whether that is shown to be better (1), to
    be worse (-1), or neither (0)."""

    words: str
    interval: str
    shown: int

    @property
    def sentence(self) -> str:
        """All of it, in half a sentence."""
        return f"{self.words}, {self.interval}" if self.shown else f"can't tell: {self.words}, {self.interval}"


def against_baseline(evaluation: Evaluation) -> AgainstBaseline | None:
    """None without a baseline."""
    metric, gain = evaluation.metric.name, evaluation.gain
    if evaluation.baseline.of(metric) is None:
        return None
    better_is_above = metric not in fmt.LESS_IS_BETTER
    unit, digits = fmt.UNITS.get(metric, ("%", 1))
    low, high = (gain.low, gain.high) if gain.value >= 0 else (-gain.high, -gain.low)
    side = "above" if (gain.value >= 0) == better_is_above else "below"
    words = f"{abs(gain.value):.{digits}f} {unit} {side}" if gain.value else "equal"
    return AgainstBaseline(words, f"{fmt.limits(low, high, digits)} with 95 % confidence", gain.shown)
