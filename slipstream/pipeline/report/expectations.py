"""Comparison of a training with what was expected: the prediction of ``slipstream plan``, the measured interconnect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.pipeline.report.costs import CostFigures
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.devices import COMMUNICATION, Bottleneck
from slipstream.shared.artifacts.results.ledger import TrainingFigures
from slipstream.shared.interconnect.profile import NetworkProfile
from slipstream.shared.profiles.placement import Planned
from slipstream.shared.telemetry.bottleneck import WORTH_A_LOOK

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


def expected_exchange(profile: NetworkProfile, exchanged_bytes: int) -> float | None:
    """Return the expected seconds of an all_reduce of ``exchanged_bytes``; None if all_reduce was not measured.

    Interpolates linearly between measured sizes; above the largest size, its bandwidth is assumed.
    """
    measured = profile.of("all_reduce")
    if not measured:
        return None
    sizes, seconds = [m.bytes for m in measured], [m.p50 for m in measured]
    if exchanged_bytes > sizes[-1]:
        return seconds[-1] * exchanged_bytes / sizes[-1]
    return float(np.interp(exchanged_bytes, sizes, seconds))


def against_interconnect(found: Bottleneck, profile: NetworkProfile) -> str:
    """Compare the gradient exchange with the interconnect in a sentence; "" if the exchange took little time.

    ``profile`` must be measured with the same processes.
    """
    if found.shares.get(COMMUNICATION, 0.0) < WORTH_A_LOOK or not found.exchanged_bytes:
        return ""
    expected = expected_exchange(profile, found.exchanged_bytes)
    if expected is None:
        return ""
    needed, waited = fmt.duration(expected), fmt.duration(found.least_exchange_s)
    return (
        f"The measured interconnect needs {needed} for an all_reduce of {fmt.file_size(found.exchanged_bytes)}; every "
        f"rank waited at least {waited} for it after its last gradient."
    )
