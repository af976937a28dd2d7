"""``slipstream schedules``: list all schedules with their next three times and their work."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from slipstream.shared.cron import next_times
from slipstream.shared.settings import Settings, as_written
from slipstream.shared.source.dates import dated_address, has_date
from workflows.schedules.settings import (
    CHOICE,
    DEFAULT,
    AnySchedule,
    CollectivesSchedule,
    ScoringSchedule,
    SweepSchedule,
    TrainingSchedule,
    environment_path,
    read_schedules,
)

INDENT = " " * 4


@click.command()
@click.argument("environment", envvar=CHOICE, default=DEFAULT)
def main(environment: str) -> None:
    """List the schedules of ENVIRONMENT: development, staging, production, or a path to a .toml.

    Example: slipstream schedules staging
    """
    schedules = read_schedules(environment)
    click.echo(f"{environment_path(environment)}: {len(schedules)} schedules, times in UTC")
    for name, schedule in schedules.items():
        click.echo(f"\n{name}")
        for line in described(name, schedule, datetime.now(UTC)):
            click.echo(textwrap.indent(line, INDENT))


def described(name: str, schedule: AnySchedule, now: datetime) -> Iterator[str]:
    if schedule.cron:
        times = next_times(schedule.cron, now, 3)
        yield f"{schedule.cron}: {', '.join(f'{time:%a %Y-%m-%d %H:%M}' for time in times)}"
        if has_date(data := getattr(schedule, "data", "")):
            yield f"data of these times: {', '.join(dated_address('data', data, time) for time in times)}"
        yield "skipped while the run before is still going"
    else:
        yield f"when it is started: pyflyte run remote-launchplan {name}"
    yield from work_of(schedule)
    if changed := changes(schedule.config):
        yield f"with {json.dumps(changed)}"
    if labels := [f"{label}={value}" for label, value in schedule.all_labels.items()]:
        yield f"labels its pods {', '.join(labels)}"
    if addresses := [*schedule.notify.email, *schedule.notify.slack]:
        yield f"tells {', '.join(addresses)} if it {', '.join(schedule.notify.on)}"


def work_of(schedule: AnySchedule) -> Iterator[str]:
    match schedule:
        case TrainingSchedule():
            target = f", target {schedule.target}" if schedule.target else ""
            yield f"trains on {schedule.data or 'the handwritten digits of scikit-learn'}{target}, exports and reports"
            if schedule.registry:
                yield f"promotes the model in {schedule.registry} if it is shown not to be worse"
        case ScoringSchedule():
            yield f"scores {schedule.data} with the model in service in {schedule.registry}, into {schedule.output}"
            if schedule.training_data:
                yield f"trains on {schedule.training_data} and promotes there if the rows drift"
        case SweepSchedule():
            target, asked = f", target {schedule.target}" if schedule.target else "", schedule.config.sweep
            yield f"tries {', '.join(sorted(asked.space))} in {asked.trials} trials on {schedule.data}{target}"
            yield "trains with the best, exports and reports"
        case CollectivesSchedule():
            sizes, count = schedule.config.sizes, len(schedule.config.operations)
            yield f"measures {count} collective{'s' if count > 1 else ''} from {sizes[0]:,} to {sizes[-1]:,} bytes"


def changes(config: Settings) -> dict[str, object]:
    return differing(as_written(config), as_written(type(config)()))


def differing(given: dict[str, Any], default: dict[str, Any]) -> dict[str, object]:
    found = {}
    for name, value in given.items():
        if isinstance(value, dict) and isinstance(default.get(name), dict) and default[name]:
            value = differing(value, default[name]) or default[name]
        if value != default.get(name):
            found[name] = value
    return found
