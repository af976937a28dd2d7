"""``slipstream plan``: GPU type, count and capacity type for a training, with hours and dollars."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import click
from click.core import ParameterSource

from slipstream.operations.plan.advice import (
    advice_sentences,
    pareto_optimal,
    recommended_choice,
)
from slipstream.operations.plan.capacity import PodCapacity, from_attempts, from_file
from slipstream.operations.plan.decide import (
    PlannedOption,
    SimulatedOutcome,
    TrainingRequirements,
    plan_options,
)
from slipstream.operations.plan.measured import GivenMeasurements, read_evidence
from slipstream.operations.plan.money import TimeParam
from slipstream.operations.plan.options import instance_options, left_out
from slipstream.operations.plan.serving.command import serve
from slipstream.operations.plan.text import TrainingPlan, text
from slipstream.operations.plan.write import planned_figures, profile_toml, write_profile
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import CHOICE, Profile, load_profile, profile_names
from slipstream.shared.telemetry.prices import PriceList, built_in_prices, merge_prices, old_prices, read_prices


@click.group(invoke_without_command=True)
@click.option(
    "--measured",
    multiple=True,
    metavar="RUN",
    help="Measured run: runs/…, a trained model, checkpoints or a network profile.",
)
@click.option(
    "--deadline",
    type=TimeParam("h", "90min, 8h or 2d"),
    help="Maximum time, kept with 95 % probability, such as 8h or 90min.",
)
@click.option("--budget", type=float, help="Maximum cost in dollars, kept with 95 % probability.")
@click.option("--trials", type=int, default=1, help="Number of such trainings, as in a sweep.")
@click.option("--parallel", type=int, default=1, help="Number of trainings at a time.")
@click.option("--rows", type=int, help="Rows of every training, over all epochs [default: those of RUN].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verbose", is_flag=True, help="Print all options and columns, and the sources of the figures.")
@click.option(
    "--write", type=click.Path(dir_okay=False, path_type=Path), help="Write the resulting profile to this file."
)
@click.option(
    "--prices", type=click.Path(path_type=Path), help="TOML with your prices, which override the built-in ones."
)
@click.option(
    "--capacity", type=click.Path(path_type=Path), help="CSV or JSON with recorded up and wait hours of a pod."
)
@click.pass_context
def main(  # noqa: PLR0913 - an argument for each option
    ctx: click.Context,
    measured: tuple[str, ...],
    deadline: float | None,
    budget: float | None,
    trials: int,
    parallel: int,
    rows: int | None,
    as_json: bool,
    verbose: bool,
    write: Path | None,
    prices: Path | None,
    capacity: Path | None,
) -> None:
    """Estimate hours, dollars on spot and on demand, and interruptions of a measured training on other GPUs.

    The first RUN with a training is planned. Further trainings improve the error estimate, and checkpoint directories
    the preemption rate.

    Example: slipstream plan --measured runs/2026-11-26T11-33-03 --deadline 8h --write mine.toml
    """
    if ctx.invoked_subcommand:
        refuse_options_before(ctx.invoked_subcommand, ctx)
        return
    for name, number in (("trials", trials), ("parallel", parallel), ("rows", rows)):
        if number is not None and number < 1:
            raise UserError(f"--{name} {number}: expected a whole number from 1 on")
    if budget is not None and not budget > 0:
        raise UserError(f"--budget {budget:g}: expected dollars above 0")
    if write and write.suffix != ".toml":
        raise UserError(f"--write {write}: cannot be loaded as a profile; expected a name that ends with .toml")
    known = from_file(capacity) if capacity else None
    evidence = read_evidence(measured)
    listed = merge_prices(built_in_prices(), read_prices(prices)) if prices else built_in_prices()
    made = make_training_plan(evidence, listed, TrainingRequirements(trials, parallel, deadline, budget, known, rows))
    if write:
        best = recommended_choice(made.found, made.wanted)
        if best is None:
            raise UserError(
                f"--write {write}: {' '.join(advice_sentences(made.found, made.wanted))} Expected more of either"
            )
        write_profile(profile_toml(best, planned_figures(best, made.planned, made.wanted), write.parent), write)
    click.echo(json.dumps(tree(made), indent=1, allow_nan=False) if as_json else text(made, verbose=verbose))


main.add_command(serve)


def refuse_options_before(subcommand: str, ctx: click.Context) -> None:
    """Raise ``UserError`` for options before ``subcommand``, which does not read them."""
    for parameter in ctx.command.params:
        if parameter.name and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise UserError(
                f"slipstream plan {parameter.opts[0]} … {subcommand}: expected its own options after {subcommand}"
            )


def make_training_plan(evidence: GivenMeasurements, prices: PriceList, wanted: TrainingRequirements) -> TrainingPlan:
    """Return the plan of the first training.

    Raises ``UserError`` if no option can be planned.
    """
    profiles = known_profiles()
    planned = evidence.trainings[0]
    recorded = from_attempts(evidence.attempts)
    if wanted.capacity is None and recorded and recorded.interruptions:
        wanted = replace(wanted, capacity=recorded)
    rows = plan_options(planned, evidence.trainings, instance_options(profiles, prices), evidence.networks, wanted)
    notes = [*times(rows), *capacity_notes(wanted.capacity), *old_price_warnings(rows), *left_out(profiles, prices)]
    return TrainingPlan(planned, wanted, rows, notes)


def known_profiles() -> list[Profile]:
    """Return the user's chosen profile, if any, and the built-in ones.

    Raises ``UserError`` if the chosen one has no GPU.
    """
    chosen = os.environ.get(CHOICE, "")
    if chosen in ("", *profile_names()):
        return [load_profile(name) for name in profile_names()]
    own = load_profile(chosen, f"{CHOICE}=")
    if not int(own.asked("train").gpu):
        raise UserError(f"{CHOICE}={chosen}: its training has no GPU to plan; expected gpu in [distributed]")
    return [own, *map(load_profile, profile_names())]


def times(rows: Sequence[PlannedOption]) -> Iterator[str]:
    hows: dict[str, list[str]] = {}
    for row in rows:
        if row.time:
            hows.setdefault(row.time.how, []).append(f"{row.option.processes} {row.option.gpu.name}")
    for how, on in hows.items():
        yield f"hours {how}: {', '.join(dict.fromkeys(on))}"


def capacity_notes(capacity: PodCapacity | None) -> Iterator[str]:
    if capacity:
        yield f"spot capacity: {capacity}"
    else:
        yield "spot capacity: by each profile's preemptions_per_day; waits of 1 h assumed: none were recorded"


def old_price_warnings(rows: Sequence[PlannedOption], today: date | None = None) -> Iterator[str]:
    return old_prices(
        {row.option.instance.name: row.option.price.dated for row in rows if row.option.price.dated}, today
    )


def tree(made: TrainingPlan) -> dict[str, object]:
    """Return the plan as JSON-compatible values."""
    best = recommended_choice(made.found, made.wanted)
    return {
        "planned": made.planned.name,
        "rows": [row_tree(row) for row in made.rows],
        "pareto": [str(choice) for choice in pareto_optimal(made.found)],
        "take": str(best) if best else None,
        "because": list(advice_sentences(made.found, made.wanted)),
        "notes": list(made.notes),
    }


def row_tree(row: PlannedOption) -> dict[str, object]:
    option = row.option
    return {
        "profile": option.profile,
        "instance": option.instance.name,
        "region": option.instance.region,
        "gpu": option.gpu.name,
        "pods": option.pods,
        "gpus": option.gpus,
        "fits": row.fits,
        "time": row.time.how if row.time else None,
        "work_seconds": row.time.seconds if row.time else None,
        "pays_from_hours": row.pays_from,
        "no_spot": row.no_spot,
        "outcomes": [finite(each) for each in row.outcomes],
    }


def finite(outcome: SimulatedOutcome) -> dict[str, object]:
    """Return an outcome as JSON-compatible values, with None for infinity."""

    def clean(value: object) -> object:
        if isinstance(value, dict):
            return {name: clean(each) for name, each in value.items()}
        return None if value == float("inf") else value

    return {name: clean(vars(value) if hasattr(value, "__dict__") else value) for name, value in vars(outcome).items()}
