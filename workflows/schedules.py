"""The launch plans: what runs by itself, and when. Their settings are data: ``schedules.toml``.

``pyflyte register --activate-launchplans`` (or ``pyflyte launchplan NAME VERSION --activate`` after ``package``)
switches a schedule on. The inputs are fixed, the data is not: the workflow's first task is never cached and looks at
the bytes behind ``data`` afresh each night, so that new data is new work and unchanged data is not.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from flytekit import CronSchedule, Email, LaunchPlan, Slack
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase

from tasks.config import RunConfig
from tasks.errors import UserError
from tasks.settings import Settings, settings, unknown
from workflows.training import train_and_export

CHOICE = "SLIPSTREAM_SCHEDULES"
Phase = Literal["succeeded", "failed", "timed_out", "aborted"]


@settings
class Notify(Settings):
    """Who hears of what."""

    section = "nightly_training.notify"

    email: list[str] = field(default_factory=list)
    slack: list[str] = field(default_factory=list)
    on: list[Phase] = field(default_factory=lambda: ["failed", "timed_out", "aborted"])


@settings
class Schedule(Settings):
    """One scheduled training: when (cron, UTC), on what, and with which configuration."""

    section = "nightly_training"

    cron: str = "0 2 * * *"
    data: str = ""
    target: str = ""
    config: RunConfig = field(default_factory=RunConfig)
    notify: Notify = field(default_factory=Notify)


def read_schedules(path: Path) -> Schedule:
    """Raises ``UserError`` naming the file and the setting that is wrong."""
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the schedules cannot be read: {error}") from None
    for name in data:
        if name != Schedule.section:
            raise UserError(f"{path}: {unknown('', name, [Schedule.section])}")
    try:
        return Schedule.from_dict(data.get(Schedule.section, {}))
    except UserError as error:
        raise UserError(f"{path}: {error.message}") from None


def notifications(notify: Notify) -> list[Email | Slack]:
    phases = [getattr(WorkflowExecutionPhase, phase.upper()) for phase in notify.on]
    kinds = ((Email, notify.email), (Slack, notify.slack))
    return [kind(phases=phases, recipients_email=addresses) for kind, addresses in kinds if addresses]


def nightly(schedule: Schedule) -> LaunchPlan:
    """The launch plan of one scheduled training. A night still running is not overtaken by the next."""
    return LaunchPlan.get_or_create(
        train_and_export,
        name="nightly_training",
        fixed_inputs={"data": schedule.data, "target": schedule.target, "config": schedule.config},
        schedule=CronSchedule(schedule=schedule.cron),
        notifications=notifications(schedule.notify),
        concurrency=ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP),
        auto_activate=False,
    )


nightly_training = nightly(read_schedules(Path(os.environ.get(CHOICE) or Path(__file__).with_suffix(".toml"))))
