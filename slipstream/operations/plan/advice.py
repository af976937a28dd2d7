"""Recommendation: the cheapest option within deadline and budget, its savings, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.operations.plan.decide import ON_DEMAND, SPOT, PlannedOption, SimulatedOutcome, TrainingRequirements
from slipstream.shared.formatting import duration

#: Relative time saving below which a faster choice is not listed.
SOONER = 0.01


@dataclass(frozen=True)
class CapacityChoice:
    """Option on spot or on demand, with its simulated outcome."""

    row: PlannedOption
    outcome: SimulatedOutcome

    @property
    def known(self) -> bool:
        """True if the hours include the gradient exchange between processes."""
        return self.row.time is not None and self.row.time.exchange_known

    def __str__(self) -> str:
        option = self.row.option
        of = f"{option.pods} x " if option.pods > 1 else ""
        part = "" if option.gpus == option.instance.gpus else f", {option.gpus} of its {option.instance.gpus} GPUs"
        profile = f" (profile {option.profile})" if option.profile else ""
        return f"{of}{option.instance.name}{part}{profile}, {self.outcome.way}"


def feasible_choices(rows: Sequence[PlannedOption]) -> list[CapacityChoice]:
    """Return all feasible choices, the cheapest first.

    Spot is included only if it costs less than the same option on demand.
    """
    found = []
    for row in rows:
        on_demand, spot = row.outcome(ON_DEMAND), row.outcome(SPOT)
        if on_demand:
            found.append(CapacityChoice(row, on_demand))
        if spot and (on_demand is None or spot.mean_dollars < on_demand.mean_dollars):
            found.append(CapacityChoice(row, spot))
    return sorted(found, key=lambda choice: (choice.outcome.mean_dollars, choice.outcome.hours.high))


def pareto_optimal(found: Sequence[CapacityChoice]) -> list[CapacityChoice]:
    """Return the choices that are Pareto-optimal in mean dollars and 95 % quantile of hours, the cheapest first.

    A dearer choice must be faster by more than :data:`SOONER`.
    """
    best, earliest = [], float("inf")
    for choice in sorted(found, key=lambda one: (one.outcome.mean_dollars, one.outcome.hours.high)):
        if choice.outcome.hours.high < earliest * (1 - SOONER):
            best.append(choice)
            earliest = choice.outcome.hours.high
    return best


def recommended_choice(found: Sequence[CapacityChoice], wanted: TrainingRequirements) -> CapacityChoice | None:
    """Return the cheapest choice that keeps deadline and budget with 95 % probability, or None.

    Choices whose hours include the gradient exchange are preferred.
    """
    kept = [choice for choice in found if choice.outcome.keeps(wanted)]
    return next((choice for choice in sorted(kept, key=lambda one: not one.known)), None)


def advice_sentences(found: Sequence[CapacityChoice], wanted: TrainingRequirements) -> Iterator[str]:
    """Yield the recommendation, its savings, and what would change it."""
    best = recommended_choice(found, wanted)
    if best is None:
        near = min(found, key=lambda choice: choice.outcome.hours.high)
        yield (
            f"No option keeps {limits(wanted)} with 95 % probability: the fastest is {near}, {hours(near.outcome)}, "
            f"{dollars(near.outcome)}."
        )
        return
    yield f"Take {best}: {hours(best.outcome)}, {dollars(best.outcome)}."
    other = best.row.outcome(ON_DEMAND if best.outcome.way == SPOT else SPOT)
    if best.outcome.way == SPOT and other:
        less = other.mean_dollars - best.outcome.mean_dollars
        yield f"It saves ${less:,.2f} ({less / other.mean_dollars:.0%}) over the same on demand."
    yield from what_changes_it(best, found, wanted)


def what_changes_it(
    best: CapacityChoice, found: Sequence[CapacityChoice], wanted: TrainingRequirements
) -> Iterator[str]:
    on_spot, from_hours = best.outcome.way == SPOT, best.row.pays_from
    if on_spot and from_hours:
        yield f"On demand is cheaper if a pod is interrupted more often than every {duration(3600 * from_hours)}."
    if not on_spot and best.row.no_spot:
        yield f"Spot is not planned there: {best.row.no_spot}."
    elif not on_spot and from_hours:
        yield (
            f"Spot is cheaper from {duration(3600 * from_hours)} between interruptions of a pod on, if the deadline "
            "holds."
        )
    if wanted.deadline is not None:
        slack = wanted.deadline - best.outcome.hours.high
        yield (
            f"The deadline leaves {duration(3600 * slack)} at 95 % probability; {best.outcome.in_time:.1%} of the runs "
            "keep "
            "it."
        )
        cheaper = [one for one in found if one.known and one.outcome.mean_dollars < best.outcome.mean_dollars]
        if cheaper:
            its = cheaper[0].outcome
            yield f"With a deadline of {duration(3600 * its.hours.high)} it would be {cheaper[0]}, {dollars(its)}."
    faster = [one for one in pareto_optimal(found) if one.outcome.hours.high < best.outcome.hours.high]
    fastest = [one for one in faster[1:] if one.outcome.keeps(wanted)][-1:]
    for word, choice in [*(("Faster", one) for one in faster[:1]), *(("Fastest", one) for one in fastest)]:
        allows = "" if choice.known else ", if its gradient exchange, which was not measured, allows it"
        yield f"{word}: {choice}, {hours(choice.outcome)}, {dollars(choice.outcome)}{allows}."
    if not best.known:
        yield (
            f"Its hours exclude the gradient exchange between its {best.row.option.processes} processes, which was "
            "not measured."
        )
    time = best.row.time
    if time and time.spread and time.how.startswith("predicted"):
        yield f"Its hours are {time.how}: a short run there would measure them."


def limits(wanted: TrainingRequirements) -> str:
    given = [
        duration(3600 * wanted.deadline) if wanted.deadline is not None else "",
        f"${wanted.budget:,.2f}" if wanted.budget is not None else "",
    ]
    return " and ".join(filter(None, given))


def hours(outcome: SimulatedOutcome) -> str:
    return f"{duration(3600 * outcome.hours.median)} ({duration(3600 * outcome.hours.high)} at 95 %)"


def dollars(outcome: SimulatedOutcome) -> str:
    its = outcome.dollars
    return f"${its.median:,.2f} (${its.low:,.2f} to ${its.high:,.2f})"
