"""What a training took, beside what ``slipstream plan`` said when it wrote the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from slipstream.artifacts.results.training_figures import TrainingFigures
from slipstream.profiles.planned import Planned
from slipstream.report import formatting as fmt
from slipstream.report.costs import CostFigures

TRAIN = "train"
HOUR_S = 3600
#: A training on so many times as many rows as planned, or as little, is another one.
ALIKE = 1.01


@dataclass(frozen=True)
class PlannedAmount:
    """What was planned, and what it was."""

    #: Below these are 5, 50 and 95 % of the planned trainings.
    planned: list[float]
    #: None where it is not known.
    actual: float | None

    @property
    def answer(self) -> str:
        """Whether the training was as planned: within what 90 of 100 are."""
        if self.actual is None:
            return "not known"
        low, _, high = self.planned
        if self.actual < low:
            return "less than planned"
        return "more than planned" if self.actual > high else "as planned"


@dataclass(frozen=True)
class AgainstPlan:
    """A planned training that ran."""

    take: str
    #: On the clock, from the start of the first attempt to the end of the last.
    hours: PlannedAmount
    dollars: PlannedAmount
    #: The planned mean, and how often the training was interrupted.
    planned_interruptions: float
    interruptions: int
    #: Rows that were trained on, if they were others than planned; else 0.
    other_rows: int = 0

    def lines(self) -> Iterator[tuple[str, str, str, str]]:
        """Of each amount its name, what was planned, what it was, and the answer."""
        yield "time", *amounts(self.hours, hours), self.hours.answer
        yield "dollars", *amounts(self.dollars, fmt.dollars), self.dollars.answer
        mean = f"{fmt.significant(self.planned_interruptions)} on average"
        yield "interruptions", mean, fmt.count(self.interruptions), ""

    @property
    def caveat(self) -> str:
        if not self.other_rows:
            return ""
        return f"It trained on {fmt.rows(self.other_rows)}, not on as many as were planned."


def amounts(amount: PlannedAmount, form: Callable[[float], str]) -> tuple[str, str]:
    low, median, high = map(form, amount.planned)
    return f"{median} ({low} to {high})", fmt.UNKNOWN if amount.actual is None else form(amount.actual)


def hours(value: float) -> str:
    return fmt.seconds(HOUR_S * value)


def against_plan(
    planned: Planned | None, training: TrainingFigures, costs: Sequence[CostFigures]
) -> AgainstPlan | None:
    """None if nothing was planned."""
    if planned is None:
        return None
    trained = training.ledger.kept * training.batch_size
    alike = planned.rows / ALIKE <= trained <= planned.rows * ALIKE
    paid = next((cost.paid for cost in costs if cost.stage == TRAIN), None)
    return AgainstPlan(
        take=planned.take,
        hours=PlannedAmount(planned.hours, on_the_clock(training) / HOUR_S),
        dollars=PlannedAmount([round(each, 2) for each in planned.dollars], paid),  # as they are paid, to the cent
        planned_interruptions=planned.interruptions,
        interruptions=training.ledger.attempts - 1,
        other_rows=0 if alike else trained,
    )


def on_the_clock(training: TrainingFigures) -> float:
    """Seconds, the waits between attempts included where their times are known."""
    began = [attempt.began_at for attempt in training.attempts]
    if not began or not all(began):
        return training.ledger.wall
    return max(attempt.began_at + attempt.seconds for attempt in training.attempts) - min(began)
