"""Text of a training's plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.operations.plan.advice import (
    CapacityChoice,
    advice_sentences,
    feasible_choices,
    pareto_optimal,
)
from slipstream.operations.plan.decide import ON_DEMAND, SPOT, PlannedOption, SimulatedOutcome, TrainingRequirements
from slipstream.operations.plan.measured import MeasuredTraining
from slipstream.shared.formatting import aligned_table, count_with_noun, duration


@dataclass(frozen=True)
class TrainingPlan:
    """Content of the printed plan."""

    planned: MeasuredTraining
    wanted: TrainingRequirements
    rows: Sequence[PlannedOption]
    notes: Sequence[str]

    @property
    def found(self) -> list[CapacityChoice]:
        return feasible_choices(self.rows)


def text(made: TrainingPlan, *, verbose: bool) -> str:
    its, best = made.planned, pareto_optimal(made.found)
    of = f"{made.wanted.trials} trainings, {made.wanted.parallel} at a time, each" if made.wanted.trials > 1 else "one"
    head = (
        f"{of} like {its.name}: {made.wanted.rows or its.rows:,} rows, {its.flops_per_row:.3g} operations a row, "
        f"{its.memory_bytes / 1e9:.3g} GB at most in each of {count_with_noun(its.processes, 'process')}"
    )
    again = (its.computing_s + its.waiting_s) * (made.wanted.rows or its.rows) / its.rows
    here = f"On the {count_with_noun(its.processes, 'process')} of the measured run: {duration(again)} of work."
    take, *others = advice_sentences(made.found, made.wanted)
    answer = [head, take, *filter(None, [" ".join(others)]), here]
    if verbose:
        notes = "\n".join(f"  {note}" for note in made.notes)
        return "\n\n".join(["\n".join(answer), options_table(made.rows, best, MORE), dollars_chart(best), notes])
    shown = shortest_list(made, best)
    left = len(made.rows) - len(shown)
    more = [f"{count_with_noun(left, 'more option')} and the sources of the figures: --verbose"] if left else []
    return "\n\n".join(["\n".join(answer), "\n".join([options_table(shown, best, ()), *more])])


def shortest_list(made: TrainingPlan, best: Sequence[CapacityChoice]) -> list[PlannedOption]:
    """Return the Pareto-optimal options and the cheapest of each kind and number of GPUs."""
    cheapest: dict[object, CapacityChoice] = {}
    for choice in made.found:
        cheapest.setdefault((choice.row.option.gpu.name, choice.row.option.processes), choice)
    ranked = dict.fromkeys(id(choice.row) for choice in [*best, *cheapest.values()])
    shown = set(list(ranked)[:SHOWN])
    return [row for row in made.rows if id(row) in shown]


COLUMNS = (
    "profile",
    "instance",
    "GPUs",
    "spot (95 %)",
    "spot $ (5 to 95 %)",
    "on demand (95 %)",
    "on demand $ (5 to 95 %)",
)
MORE = ("interrupted", "retries", "checkpoint every", "time")
LEFT = ("", "profile", "instance", "time")
WIDTH = 40
#: Maximum number of options in the table without ``--verbose``.
SHOWN = 8
BEST = "Pareto-optimal"


def options_table(rows: Sequence[PlannedOption], best: Sequence[CapacityChoice], more: Sequence[str]) -> str:
    """Return a line for every option, with Pareto-optimal ones marked."""
    marked = {id(choice.row) for choice in best}
    width = len(COLUMNS) + len(more)
    lines = [["▸" if id(row) in marked else "", *cells(row)[:width]] for row in rows]
    return aligned_table(("", *COLUMNS, *more), lines, left=LEFT)


def cells(row: PlannedOption) -> list[str]:
    option, spot, on_demand = row.option, row.outcome(SPOT), row.outcome(ON_DEMAND)
    count = f"{option.pods} x {option.gpus}" if option.pods > 1 else str(option.gpus)
    named = [option.profile or "-", option.instance.name, f"{count} {option.gpu.name}"]
    if not row.fits or row.time is None:
        return [*named, *["-"] * (len(COLUMNS) + len(MORE) - len(named) - 1), "does not fit"]
    return [
        *named,
        hours(spot),
        dollars(spot),
        hours(on_demand),
        dollars(on_demand),
        f"{spot.interruptions:.2g}" if spot else "-",
        str(spot.retries) if spot else "-",
        duration(spot.checkpoint_s) if spot else "-",
        row.time.how.split()[0].rstrip(","),
    ]


def hours(outcome: SimulatedOutcome | None) -> str:
    return f"{duration(3600 * outcome.hours.median)} ({duration(3600 * outcome.hours.high)})" if outcome else "-"


def dollars(outcome: SimulatedOutcome | None) -> str:
    if outcome is None:
        return "-"
    if math.isinf(outcome.dollars.median):
        return "no end"
    return f"{outcome.dollars.median:,.2f} ({outcome.dollars.low:,.2f} to {outcome.dollars.high:,.2f})"


def dollars_chart(best: Sequence[CapacityChoice]) -> str:
    """Return Pareto-optimal choices as bars of their dollars."""
    ended = [choice for choice in best if math.isfinite(choice.outcome.dollars.median)]
    most = max((choice.outcome.dollars.median for choice in ended), default=0.0)
    rows = [
        [
            str(choice),
            duration(3600 * choice.outcome.hours.high),
            f"${choice.outcome.dollars.median:,.2f}",
            "━" * max(1, round(WIDTH * choice.outcome.dollars.median / most)),
        ]
        for choice in ended
    ]
    return aligned_table((BEST, "95 %", "dollars", ""), rows, left=(BEST, ""))
