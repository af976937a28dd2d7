"""Comparison of a training with the prediction of ``slipstream plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slipstream.pipeline.report.costs import CostFigures
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.ledger import TrainingFigures
from slipstream.shared.profiles.placement import Planned

TRAIN = "train"
HOUR_S = 3600
#: Factor between trained and planned rows above which the trainings are not comparable.
ALIKE = 1.01


@dataclass(frozen=True)
class PlannedAmount:
    """Planned and actual hours or dollars of a training."""

    #: 5th, 50th and 95th percentile of the simulated trainings.
    planned: list[float]
    #: None if unknown.
    actual: float | None

    @property
    def answer(self) -> str:
        """Position of the actual amount relative to the planned 90 % interval."""
        if self.actual is None:
            return "unknown"
        low, _, high = self.planned
        if self.actual < low:
            return "less than planned"
        return "more than planned" if self.actual > high else "as planned"


@dataclass(frozen=True)
class AgainstPlan:
    """Planned and actual figures of a training; ``take`` is the planned instance and capacity type."""

    take: str
    #: Wall-clock hours from the start of the first attempt to the end of the last.
    hours: PlannedAmount
    dollars: PlannedAmount
    #: The planned mean number of interruptions, and the actual number.
    planned_interruptions: float
    interruptions: int
    #: Rows trained on if they differ from the plan, else 0.
    other_rows: int = 0

    def lines(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield a line per figure: name, planned and actual amount, and whether that is as planned ("" if unknown)."""
        yield "time", *amounts(self.hours, lambda hours: fmt.seconds(HOUR_S * hours)), self.hours.answer
        yield "dollars", *amounts(self.dollars, fmt.dollars), self.dollars.answer
        mean = f"{fmt.significant(self.planned_interruptions)} on average"
        yield "interruptions", mean, fmt.count(self.interruptions), ""

    @property
    def caveat(self) -> str:
        if not self.other_rows:
            return ""
        return f"It trained on {fmt.rows(self.other_rows)}, not on the planned number."


def amounts(amount: PlannedAmount, form: Callable[[float], str]) -> tuple[str, str]:
    low, median, high = map(form, amount.planned)
    return f"{median} ({low} to {high})", fmt.UNKNOWN if amount.actual is None else form(amount.actual)


def against_plan(
    planned: Planned | None, training: TrainingFigures, costs: Sequence[CostFigures]
) -> AgainstPlan | None:
    if planned is None:
        return None
    trained = training.ledger.kept * training.batch_size
    alike = planned.rows / ALIKE <= trained <= planned.rows * ALIKE
    paid = next((cost.paid for cost in costs if cost.stage == TRAIN and not cost.unpriced_pod_hours), None)
    return AgainstPlan(
        take=planned.take,
        hours=PlannedAmount(planned.hours, on_the_clock(training) / HOUR_S),
        dollars=PlannedAmount([round(each, 2) for each in planned.dollars], paid),  # to the cent, as paid
        planned_interruptions=planned.interruptions,
        interruptions=training.ledger.attempts - 1,
        other_rows=0 if alike else trained,
    )


def on_the_clock(training: TrainingFigures) -> float:
    """Return wall-clock seconds, including waits between attempts if their times are known."""
    began = [attempt.began_at for attempt in training.attempts]
    if not began or not all(began):
        return training.ledger.wall
    return max(attempt.began_at + attempt.seconds for attempt in training.attempts) - min(began)
