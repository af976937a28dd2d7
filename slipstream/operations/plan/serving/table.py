"""Serving plan as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from slipstream.operations.plan.serving.advice import money, number, per_million, spread
from slipstream.operations.plan.serving.decide import ServingOption
from slipstream.operations.plan.serving.load import RequestLoad
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.operations.plan.times import milliseconds
from slipstream.shared.text_table import aligned_table

COLUMNS = ("variant", "instance", "replicas", "of each", "one request", "p99", "$ a month", "up to", "per million")
MORE = ("nightly $", "time")
LEFT = ("", "variant", "instance", "time")
HOURS = ("hours", "requests/s", "replicas", "instances")
#: Maximum printed rows; JSON has all.
SHOWN = 16


def serving_table(rows: Sequence[ServingOption], best: ServingOption, load: RequestLoad) -> str:
    """Return a line for every variant and instance, the cheapest first, with the recommendation marked."""
    shown = rows[:SHOWN] if best in rows[:SHOWN] else [*rows[: SHOWN - 1], best]
    lines = [["▸" if row is best else "", *cells(row, load)] for row in shown]
    left = len(rows) - len(shown)
    more = f"\n  and {left} that cost more: --json has them, --instance asks for some" if left else ""
    return aligned_table(("", *COLUMNS, *MORE), lines, left=LEFT) + more


def cells(row: ServingOption, load: RequestLoad) -> list[str]:
    named = [row.variant, f"{row.host.name} ({row.host.computes_on})"]
    time = row.time.how.split()[0].rstrip(",")
    if row.planned is None:
        return [
            *named,
            "-",
            str(row.host.holds),
            request(row.time.service),
            "not kept",
            *["-"] * 3,
            cash(row.nightly),
            time,
        ]
    worst = cash(row.worst_dollars) if row.time.error else "-"
    return [
        *named,
        spread(row.planned.replicas).split(" replica")[0],
        str(row.host.holds),
        request(row.time.service),
        milliseconds(row.planned.p99),
        cash(row.dollars),
        worst,
        money(per_million(row, load)),
        cash(row.nightly),
        time,
    ]


def request(service: ServiceTimes) -> str:
    """Return a single request's median and p99 as text."""
    return f"{milliseconds(service.median)} ({milliseconds(service.p99)})"


def cash(dollars: float) -> str:
    return f"{dollars:,.2f}" if math.isfinite(dollars) else "not kept"


def by_hour(row: ServingOption, load: RequestLoad) -> str:
    """Return a line per range of hours with equal replicas."""
    assert row.planned
    return aligned_table(HOURS, list(hour_lines(row.planned.replicas, row.planned.instances, load)), left=("hours",))


def hour_lines(replicas: Sequence[int], instances: Sequence[int], load: RequestLoad) -> Iterator[list[str]]:
    for its_replicas, each in groupby(range(24), key=lambda hour: replicas[hour]):
        hours = list(each)
        rates = [load.rates[hour] for hour in hours]
        between = number(max(rates)) if len(hours) == 1 else f"{number(min(rates))} to {number(max(rates))}"
        yield [f"{hours[0]:02}:00 to {hours[-1] + 1:02}:00", between, str(its_replicas), str(instances[hours[0]])]
