"""The launch plans, one for each schedule of the environment that is registered (``SLIPSTREAM_SCHEDULES``).

They are registered inactive; ``pyflyte register --activate-launchplans`` (or ``pyflyte launchplan NAME VERSION
--activate`` after ``package``) switches the schedules on. The inputs of a scheduled run are fixed, the data is not: the
first task is never cached and looks at the bytes behind ``data`` afresh, so that new data is new work and unchanged
data is not.
"""

from __future__ import annotations

import os
from datetime import datetime

from flytekit import CronSchedule, Email, LaunchPlan, Slack, workflow
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase

from slipstream.config import RunConfig
from slipstream.report.summary import RunSummary
from tasks.report import report
from workflows.collectives import benchmark
from workflows.schedules.settings import CHOICE, DEFAULT, CollectivesSchedule, Notify, TrainingSchedule, read_schedules
from workflows.training import promotion_stages, run_stages, train_and_export, train_and_promote

KICKOFF = "kickoff"


@workflow
def train_on_schedule(data: str, target: str, config: RunConfig, cron: str, kickoff: datetime) -> RunSummary:
    """:func:`train_and_export` as the schedule ``cron`` starts it at ``kickoff``; the report names what it skipped."""
    return report(**run_stages(data, target, config), cron=cron, kickoff=kickoff, promotion=None)


@workflow
def promote_on_schedule(
    registry: str, data: str, target: str, config: RunConfig, cron: str, kickoff: datetime
) -> RunSummary:
    """:func:`train_and_promote` as the schedule ``cron`` starts it at ``kickoff``."""
    return report(**promotion_stages(registry, data, target, config), cron=cron, kickoff=kickoff)


def notifications(notify: Notify) -> list[Email | Slack]:
    phases = [getattr(WorkflowExecutionPhase, phase.upper()) for phase in notify.on]
    kinds = ((Email, notify.email), (Slack, notify.slack))
    return [kind(phases=phases, recipients_email=addresses) for kind, addresses in kinds if addresses]


def launch_plan(name: str, schedule: TrainingSchedule | CollectivesSchedule) -> LaunchPlan:
    """A scheduled run that is still going is not overtaken by the next. Without a cron expression a run starts when
    somebody starts it, who may give other inputs."""
    of_training = isinstance(schedule, TrainingSchedule)
    inputs: dict[str, object] = {"config": schedule.config}
    by_hand, by_schedule = benchmark, benchmark
    if isinstance(schedule, TrainingSchedule):
        inputs |= {"data": schedule.data, "target": schedule.target}
        by_hand, by_schedule = train_and_export, train_on_schedule
        if schedule.registry:
            inputs["registry"] = schedule.registry
            by_hand, by_schedule = train_and_promote, promote_on_schedule
    if not schedule.cron:
        return LaunchPlan.get_or_create(
            by_hand,
            name=name,
            default_inputs=inputs,
            notifications=notifications(schedule.notify),
        )
    return LaunchPlan.get_or_create(
        by_schedule,
        name=name,
        fixed_inputs={**inputs, "cron": schedule.cron} if of_training else inputs,
        schedule=CronSchedule(schedule=schedule.cron, kickoff_time_input_arg=KICKOFF if of_training else None),
        notifications=notifications(schedule.notify),
        concurrency=ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP),
        auto_activate=False,
    )


LAUNCH_PLANS = {
    name: launch_plan(name, schedule) for name, schedule in read_schedules(os.environ.get(CHOICE) or DEFAULT).items()
}
# `pyflyte run` finds a launch plan by the name of a variable of its module.
globals().update(LAUNCH_PLANS)
