"""Plan as a table and a chart for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slipstream.operations.plan.advice import CapacityChoice, duration_text
from slipstream.operations.plan.decide import ON_DEMAND, SPOT, PlannedOption, SimulatedOutcome
from slipstream.shared.text_table import aligned_table

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
BEST = "Pareto-optimal"


def options_table(rows: Sequence[PlannedOption], best: Sequence[CapacityChoice]) -> str:
    """Return a line for every option, with Pareto-optimal ones marked."""
    marked = {id(choice.row) for choice in best}
    lines = [["▸" if id(row) in marked else "", *cells(row)] for row in rows]
    return aligned_table(("", *COLUMNS, *MORE), lines, left=LEFT)


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
        duration_text(spot.checkpoint_s / 3600) if spot else "-",
        row.time.how.split()[0].rstrip(","),
    ]


def hours(outcome: SimulatedOutcome | None) -> str:
    return f"{duration_text(outcome.hours.median)} ({duration_text(outcome.hours.high)})" if outcome else "-"


def dollars(outcome: SimulatedOutcome | None) -> str:
    if outcome is None:
        return "-"
    if math.isinf(outcome.dollars.median):
        return "no end"
    return f"{outcome.dollars.median:,.2f} ({outcome.dollars.low:,.2f} to {outcome.dollars.high:,.2f})"


def dollars_chart(best: Sequence[CapacityChoice]) -> str:
    """Return Pareto-optimal choices as bars of their dollars, with the 95 % quantile of hours."""
    ended = [choice for choice in best if math.isfinite(choice.outcome.dollars.median)]
    most = max((choice.outcome.dollars.median for choice in ended), default=0.0)
    rows = [
        [
            str(choice),
            duration_text(choice.outcome.hours.high),
            f"${choice.outcome.dollars.median:,.2f}",
            "━" * max(1, round(WIDTH * choice.outcome.dollars.median / most)),
        ]
        for choice in ended
    ]
    return aligned_table((BEST, "95 %", "dollars", ""), rows, left=(BEST, ""))
