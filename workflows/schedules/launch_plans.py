"""Launch plans, one for each schedule of the registered environment (``SLIPSTREAM_SCHEDULES``).

They are registered inactive; ``pyflyte register --activate-launchplans`` (or ``pyflyte launchplan NAME VERSION
--activate`` after ``package``) activates the schedules. The inputs of a scheduled run are fixed, but not the bytes at
``data``: the first task is never cached and fingerprints them, so only changed data is processed again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from flytekit import CronSchedule, Email, LaunchPlan, Slack
from flytekit.core.workflow import WorkflowBase
from flytekit.models.common import Annotations, Labels
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.models.security import Identity, SecurityContext

from slipstream.config import RunConfig
from slipstream.flyte.metadata import profile_workflow
from slipstream.pipeline.report.summary import RunSummary, ScoringSummary
from tasks.score import ScoringStart, score_rows
from workflows.collectives import benchmark
from workflows.schedules.settings import (
    CHOICE,
    DEFAULT,
    AnySchedule,
    CollectivesSchedule,
    Notify,
    ScoringSchedule,
    SweepSchedule,
    TrainingSchedule,
    read_schedules,
)
from workflows.scoring import retrain_if_drifted, score, score_and_retrain
from workflows.sweep import search_and_run, sweep
from workflows.training import RunStart, report_run, run_and_promote, run_stages, train_and_export, train_and_promote

KICKOFF = "kickoff"


@profile_workflow
def train_on_schedule(data: str, target: str, config: RunConfig, cron: str, kickoff: datetime) -> RunSummary:
    """Run ``train_and_export`` for the schedule ``cron`` at ``kickoff``; the report names skipped runs."""
    start = RunStart(data, target, config, cron, kickoff)
    return report_run(run_stages(start), start)


@profile_workflow
def promote_on_schedule(
    registry: str, data: str, target: str, config: RunConfig, cron: str, kickoff: datetime
) -> RunSummary:
    """Run ``train_and_promote`` for the schedule ``cron`` at ``kickoff``."""
    return run_and_promote(registry, RunStart(data, target, config, cron, kickoff))


@profile_workflow
def sweep_on_schedule(data: str, target: str, config: RunConfig, cron: str, kickoff: datetime) -> RunSummary:
    """Run ``sweep`` for the schedule ``cron`` at ``kickoff``."""
    return search_and_run(RunStart(data, target, config, cron, kickoff))


@profile_workflow
def score_on_schedule(registry: str, data: str, output: str, config: RunConfig, kickoff: datetime) -> ScoringSummary:
    """Run ``score`` with the model in production at ``kickoff``."""
    return score_rows(ScoringStart(registry, "", data, output, config, kickoff)).summary


@profile_workflow
def retrain_on_schedule(
    registry: str, data: str, output: str, training_data: str, target: str, config: RunConfig, kickoff: datetime
) -> ScoringSummary:
    """Run ``retrain_if_drifted`` at ``kickoff``."""
    return score_and_retrain(ScoringStart(registry, "", data, output, config, kickoff), training_data, target)


def flyte_notifications(notify: Notify) -> list[Email | Slack]:
    phases = [getattr(WorkflowExecutionPhase, phase.upper()) for phase in notify.on]
    kinds = ((Email, notify.email), (Slack, notify.slack))
    return [kind(phases=phases, recipients_email=addresses) for kind, addresses in kinds if addresses]


class ScheduledWorkflows(NamedTuple):
    """Workflows of a schedule for manual and scheduled starts, and the inputs of both.

    ``by_schedule`` may have the further inputs ``cron`` and ``kickoff`` (the due time).
    """

    by_hand: WorkflowBase
    by_schedule: WorkflowBase
    inputs: Mapping[str, object]


def scheduled_workflows(schedule: AnySchedule) -> ScheduledWorkflows:
    """Return the workflows and inputs of a schedule.

    A new kind of schedule needs a case here, settings in :mod:`.settings` and a description in :mod:`.command`.
    """
    match schedule:
        case TrainingSchedule(registry=""):
            inputs = {"data": schedule.data, "target": schedule.target}
            return ScheduledWorkflows(train_and_export, train_on_schedule, inputs)
        case TrainingSchedule():
            inputs = {"data": schedule.data, "target": schedule.target, "registry": schedule.registry}
            return ScheduledWorkflows(train_and_promote, promote_on_schedule, inputs)
        case ScoringSchedule():
            inputs = {"registry": schedule.registry, "data": schedule.data, "output": schedule.output}
            if not schedule.training_data:
                return ScheduledWorkflows(score, score_on_schedule, inputs)
            inputs |= {"training_data": schedule.training_data, "target": schedule.target}
            return ScheduledWorkflows(retrain_if_drifted, retrain_on_schedule, inputs)
        case SweepSchedule():
            inputs = {"data": schedule.data, "target": schedule.target}
            return ScheduledWorkflows(sweep, sweep_on_schedule, inputs)
        case CollectivesSchedule():
            return ScheduledWorkflows(benchmark, benchmark, {})


def launch_plan(name: str, schedule: AnySchedule) -> LaunchPlan:
    """Return the launch plan of a schedule.

    A run is skipped while the previous one is still running. Without a cron expression runs are started manually,
    possibly with other inputs.
    """
    starts = scheduled_workflows(schedule)
    inputs = {**starts.inputs, "config": schedule.config}
    account = schedule.service_account
    workflow = starts.by_schedule if schedule.cron else starts.by_hand
    taken = workflow.python_interface.inputs if workflow.python_interface else {}
    fixed = {**inputs, "cron": schedule.cron} if "cron" in taken else inputs
    return LaunchPlan.get_or_create(
        workflow,
        name=name,
        default_inputs=None if schedule.cron else inputs,
        fixed_inputs=fixed if schedule.cron else None,
        schedule=cron_schedule(schedule.cron, taken) if schedule.cron else None,
        notifications=flyte_notifications(schedule.notify),
        labels=Labels(schedule.all_labels),
        annotations=Annotations(schedule.annotations),
        security_context=SecurityContext(run_as=Identity(k8s_service_account=account)) if account else None,
        concurrency=ConcurrencyPolicy(1, ConcurrencyLimitBehavior.SKIP) if schedule.cron else None,
        auto_activate=False,
    )


def cron_schedule(cron: str, taken: Mapping[str, object]) -> CronSchedule:
    """Return the schedule of a workflow with the inputs ``taken``."""
    return CronSchedule(schedule=cron, kickoff_time_input_arg=KICKOFF if KICKOFF in taken else None)


LAUNCH_PLANS = {
    name: launch_plan(name, schedule) for name, schedule in read_schedules(os.environ.get(CHOICE) or DEFAULT).items()
}
# `pyflyte run` finds a launch plan by the name of a variable of its module.
globals().update(LAUNCH_PLANS)
