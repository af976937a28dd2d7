"""``slipstream plan serve``: instances and hourly replicas for serving a model, and their cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import click

from slipstream.operations.plan.money import TimeParam
from slipstream.operations.plan.serving.advice import per_million, serving_advice, spread
from slipstream.operations.plan.serving.decide import (
    Replicas,
    ServingOption,
    ServingRequirements,
    plan_serving_options,
    recommended_option,
    scale_to_zero,
)
from slipstream.operations.plan.serving.hosts import serving_instances, why_not
from slipstream.operations.plan.serving.load import HOUR_S, RequestLoad, read_load
from slipstream.operations.plan.serving.model import (
    MeasuredModel,
    contention_warnings,
    not_served,
    read_model,
    servable_variants,
)
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import aligned_table, dollars, duration, significant
from slipstream.shared.one_line import one_line
from slipstream.shared.telemetry.prices import PriceList, built_in_prices, merge_prices, old_prices, read_prices

#: Assumed seconds from the request for an instance to its first answer: boot, image pull, model load.
COLD_START_S = 120.0


@dataclass(frozen=True)
class ServingPlan:
    """Content of the printed plan."""

    model: MeasuredModel
    load: RequestLoad
    wanted: ServingRequirements
    rows: Sequence[ServingOption]
    best: ServingOption
    notes: Sequence[str]


@click.command()
@click.argument("model")
@click.option("--load", required=True, type=click.Path(path_type=Path), help="CSV with recorded requests.")
@click.option(
    "--p99",
    required=True,
    type=TimeParam("ms", "20ms or 0.5s"),
    help="Maximum latency of 99 % of the requests, such as 20ms.",
)
@click.option("--instance", multiple=True, help="Use only these instances of the price file.")
@click.option(
    "--cold-start",
    type=TimeParam("s", "30s or 2min"),
    default=COLD_START_S,
    help="Time from the start of an instance to its first answer.",
)
@click.option("--engineer-hours", type=float, help="Engineer hours of an optimisation, with --engineer-rate.")
@click.option("--engineer-rate", type=float, help="Dollars per hour of an engineer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--prices", type=click.Path(path_type=Path), help="TOML with your prices, which override the built-in ones."
)
def serve(  # noqa: PLR0913 - an argument for each option
    model: str,
    load: Path,
    p99: float,
    instance: tuple[str, ...],
    cold_start: float,
    engineer_hours: float | None,
    engineer_rate: float | None,
    as_json: bool,
    prices: Path | None,
) -> None:
    """Find the cheapest instances on which the exported MODEL answers 99 % of the requests in time.

    Prints replicas by hour of the day, dollars a month and per million requests, the cost of scoring each night
    instead, and whether an optimisation pays.

    MODEL is runs/… or an exported model's directory. The load is a CSV with the column time, a line for each request,
    or with time and requests, a line for each interval.

    Example: slipstream plan serve runs/2026-11-26T11-33-03 --load requests.csv --p99 20ms
    """
    effort = effort_of(engineer_hours, engineer_rate)
    exported = read_model(model)
    listed = merge_prices(built_in_prices(), read_prices(prices)) if prices else built_in_prices()
    wanted = ServingRequirements(p99 / 1e3, cold_start, effort)
    made = make_serving_plan(exported, read_load(load), listed, instance, wanted)
    click.echo(json.dumps(tree(made), indent=1, allow_nan=False) if as_json else text(made))


def effort_of(hours: float | None, rate: float | None) -> float | None:
    """Return the dollars of an optimisation, if both options are given.

    Raises ``UserError`` if only one is.
    """
    if hours is None and rate is None:
        return None
    for name, value in (("hours", hours), ("rate", rate)):
        if value is None or not 0 < value < math.inf:
            raise UserError(f"--engineer-{name} {'is missing' if value is None else value}: expected a number above 0")
    assert hours and rate
    return hours * rate


def make_serving_plan(
    exported: MeasuredModel, load: RequestLoad, prices: PriceList, only: Sequence[str], wanted: ServingRequirements
) -> ServingPlan:
    """Return the plan.

    Raises ``UserError`` if nothing can be planned.
    """
    variants = servable_variants(exported.report)
    if not variants:
        raise UserError(
            f"{exported.name}: too few calls of single rows were timed to know their 90th percentile; expected a model "
            "exported with more export.seconds"
        )
    found = serving_instances(prices, exported.report.machine.threads, only)
    rows = plan_serving_options(exported, variants, found, load, wanted)
    best = recommended_option(rows)
    assert best, "one is fast enough"
    notes = [
        *assumed_arrivals(load, wanted),
        *times(rows),
        f"a start takes {wanted.cold_start:.3g} s{' (assumed)' if wanted.cold_start == COLD_START_S else ''}",
        "a request is the model's own time: p99 and dollars exclude the time of server and network",
        *contention_warnings(exported.report),
        *not_served(exported.report),
        *why_not(exported, variants, found),
        *old_prices({row.host.name: row.host.dated for row in rows}),
    ]
    return ServingPlan(exported, load, wanted, rows, best, notes)


def assumed_arrivals(load: RequestLoad, wanted: ServingRequirements) -> Iterator[str]:
    """Yield what is assumed about arrivals that the recording is too coarse to show."""
    length = load.arrivals.length
    if length > wanted.p99:
        yield (
            f"requests are assumed to arrive at random (Poisson) within each {length} s of the recording, as a p99 of "
            f"{duration(wanted.p99)} depends on shorter bursts than it shows"
        )


def times(rows: Sequence[ServingOption]) -> Iterator[str]:
    """Yield one line per source of the times, with the processors that it applies to."""
    hows: dict[str, list[str]] = {}
    for row in rows:
        hows.setdefault(row.time.how, []).append(row.host.computes_on)
    for how, on in hows.items():
        yield f"times {how}: {', '.join(dict.fromkeys(on))}"


def text(made: ServingPlan) -> str:
    """Return the plan for a terminal."""
    load = made.load
    busiest = max(range(24), key=lambda hour: load.rates[hour])
    head = (
        f"{load.name}: {significant(load.month)} requests a month by {load.seconds / HOUR_S:,.3g} hours recorded; "
        f"{significant(max(load.rates))} requests/s in the busiest minute, at {busiest:02}h; "
        f"idle for {load.idle_share:.2%}"
    )
    best = one_line(f"{made.best.variant} on {made.best.host.name}")
    hours = f"{best}, by the hour of the day\n{by_hour(made.best, load)}"
    advice = " ".join(map(one_line, serving_advice(made.rows, load, made.wanted)))
    notes = "\n".join(f"  {one_line(note)}" for note in made.notes)
    return "\n\n".join([one_line(head), serving_table(made.rows, made.best, load), hours, advice, notes])


def tree(made: ServingPlan) -> dict[str, object]:
    """Return the plan as JSON."""
    return {
        "load": {
            **{name: value for name, value in vars(made.load).items() if name != "arrivals"},
            "idle": made.load.idle_share,
            "interval_seconds": made.load.arrivals.length,
        },
        "rows": [row_tree(row, made.load) for row in made.rows],
        "take": f"{made.best.variant} on {made.best.host.name}",
        "service": service_tree(made.best, made.load, made.model.report.machine.threads),
        "scale_to_zero": vars(scale_to_zero(made.best, made.load, made.wanted)),
        "because": list(serving_advice(made.rows, made.load, made.wanted)),
        "notes": list(made.notes),
    }


def service_tree(best: ServingOption, load: RequestLoad, threads: int) -> dict[str, object]:
    """Return the content of the plan for ``slipstream manifests --plan``."""
    assert best.planned
    replicas = best.planned.replicas
    most, rate = max(zip(replicas, load.rates, strict=True))
    return {
        "variant": best.variant,
        "instance": best.host.name,
        "least": min(replicas),
        "most": most,
        "busy": rate * best.time.planned.mean / most,
        "threads": threads,
        "cpus": best.host.cpus,
        "memory_gib": best.host.memory_gib,
        "of_each": best.host.holds,
    }


def row_tree(row: ServingOption, load: RequestLoad) -> dict[str, object]:
    return {
        "variant": row.variant,
        "instance": row.host.name,
        "region": row.host.region,
        "computes_on": row.host.computes_on,
        "dollars_per_hour": row.host.per_hour,
        "replicas_of_each": row.host.holds,
        "time": row.time.how,
        "request_seconds": {"median": row.time.service.median, "p99": row.time.service.p99},
        "planned": planned_tree(row.planned),
        "at_worst": planned_tree(row.at_worst),
        "dollars_a_month": None if row.planned is None else row.dollars,
        "dollars_a_month_at_worst": None if row.at_worst is None else row.worst_dollars,
        "dollars_per_million": None if row.planned is None else per_million(row, load),
        "nightly_dollars_a_month": row.nightly,
    }


def planned_tree(planned: Replicas | None) -> dict[str, object] | None:
    return vars(planned) if planned else None


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
        duration(row.planned.p99),
        cash(row.dollars),
        worst,
        dollars(per_million(row, load)),
        cash(row.nightly),
        time,
    ]


def request(service: ServiceTimes) -> str:
    """Return a single request's median and p99 as text."""
    return f"{duration(service.median)} ({duration(service.p99)})"


def cash(amount: float) -> str:
    return f"{amount:,.2f}" if math.isfinite(amount) else "not kept"


def by_hour(row: ServingOption, load: RequestLoad) -> str:
    """Return a line per range of hours with equal replicas."""
    assert row.planned
    return aligned_table(HOURS, list(hour_lines(row.planned.replicas, row.planned.instances, load)), left=("hours",))


def hour_lines(replicas: Sequence[int], instances: Sequence[int], load: RequestLoad) -> Iterator[list[str]]:
    for its_replicas, each in groupby(range(24), key=lambda hour: replicas[hour]):
        hours = list(each)
        rates = sorted(load.rates[hour] for hour in hours)
        between = " to ".join(map(significant, rates if len(hours) == 1 else (rates[0], rates[-1])))
        yield [f"{hours[0]:02}:00 to {hours[-1] + 1:02}:00", between, str(its_replicas), str(instances[hours[0]])]
