"""The Flyte tasks of the collective benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flytekit import task

from slipstream.collectives.config import CollectivesConfig
from slipstream.config import RunConfig
from tasks.flyte.artifact_types import MadeByElement, Prepared
from tasks.flyte.elastic import Workspace, distributed
from tasks.flyte.metadata import on

if TYPE_CHECKING:
    from slipstream.interconnect.profile import NetworkProfile


@task(task_config=distributed("collectives", returns=MadeByElement.of), **on("collectives"))
def benchmark_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """The interconnect in the same kind of process group that training uses: a profile of the same hardware that is
    younger than ``collectives.reuse_days``, or a new one."""
    return measure(workspace, config, reuse=True)


@task(task_config=distributed("collectives", returns=MadeByElement.of), **on("collectives"))
def measure_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """:func:`benchmark_collectives`, measured now in any case."""
    return measure(workspace, config, reuse=False)


@task(task_config=distributed("collectives", returns=MadeByElement.of), **on("collectives"))
def compare_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """:func:`measure_collectives` with the launches that it takes to tell whether the network is slower than it was;
    the answer stands above the table."""

    def body() -> None:
        import os

        from slipstream.collectives.compare import compare_with_history
        from slipstream.collectives.launch.worker_group import WorkerGroup

        compared = compare_with_history(WorkerGroup.from_environment(os.environ, config.timeout), config)
        if compared:
            profile, answer = compared
            write_results(workspace, config, profile, reused=False, above=f"{answer}\n\n")

    return workspace.work(body)


@task(task_config=distributed("collectives", returns=MadeByElement.of), **on("collectives"))
def tune_collectives(workspace: Workspace, prepared: Prepared, config: RunConfig) -> MadeByElement:
    """Settings with which training steps of the configured model on the prepared data are faster."""

    def body() -> None:
        import os

        from slipstream.artifacts.prepared.streamed import open_prepared
        from slipstream.collectives.engine import made_by
        from slipstream.collectives.launch.worker_group import WorkerGroup
        from slipstream.collectives.tune.steps import ConfiguredModel
        from slipstream.collectives.tune.tuner import tune
        from slipstream.interconnect.tuning import write_tuning

        signature = open_prepared(Path(prepared.path)).signature
        # Until its ranks have met, names are looked up on this machine alone.
        workers = WorkerGroup.from_environment(os.environ, config.collectives.timeout)
        rows = max(1, config.training.batch_size // workers.world)
        tuning = tune(workers, config.collectives, ConfiguredModel(config.model, signature, rows, config.training.seed))
        if tuning:
            write_tuning(Path(workspace.directory), tuning, {**made_by(config.collectives), "reused": False})

    return workspace.work(body)


def measure(workspace: Workspace, config: CollectivesConfig, *, reuse: bool) -> MadeByElement:
    """A worker's part. It joins no process group itself: its children do, in each launch another."""

    def body() -> None:
        import os

        from slipstream.collectives.engine import benchmark
        from slipstream.collectives.launch.worker_group import WorkerGroup

        measured = benchmark(WorkerGroup.from_environment(os.environ, config.timeout), config, reuse=reuse)
        if measured:
            write_results(workspace, config, measured[0], reused=measured[1])

    return workspace.work(body)


def write_results(
    workspace: Workspace, config: CollectivesConfig, profile: NetworkProfile, *, reused: bool, above: str = ""
) -> None:
    """Leave the profile in the workspace, with its table below the text ``above``, its CSV and its history."""
    from slipstream.artifacts.records import to_json
    from slipstream.collectives.engine import made_by
    from slipstream.collectives.model.report import model_curve
    from slipstream.collectives.output import csv_text, table
    from slipstream.interconnect.history import ProfileHistory
    from slipstream.interconnect.profile import COURSE, CSV, MODEL, TABLE, ModelPoint, TrendPoint, write_profile

    course = ProfileHistory(config.history, profile.fingerprint).course()
    forms = {TABLE: (above + table(profile)).encode(), CSV: csv_text(profile).encode()}
    drawn = {COURSE: to_json(course, list[TrendPoint]), MODEL: to_json(model_curve(profile), list[ModelPoint])}
    write_profile(Path(workspace.directory), profile, {**made_by(config), "reused": reused}, forms | drawn)
