"""The Flyte tasks of the collective benchmark."""

from __future__ import annotations

from pathlib import Path

from flytekit import task

from tasks.collectives.config import CollectivesConfig
from tasks.flyte.elastic import Workspace, distributed
from tasks.flyte.metadata import on
from tasks.flyte.stage import MadeByElement


@task(task_config=distributed("collectives", returns=MadeByElement.of), **on("collectives"))
def benchmark_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """The interconnect in the same kind of process group that training uses: a profile of the same hardware that is
    younger than ``collectives.reuse_days``, or a new one."""
    return work(workspace, config, reuse=True)


@task(task_config=distributed("collectives", returns=MadeByElement.of), **on("collectives"))
def measure_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """:func:`benchmark_collectives`, measured now in any case."""
    return work(workspace, config, reuse=False)


def work(workspace: Workspace, config: CollectivesConfig, *, reuse: bool) -> MadeByElement:
    """A worker's part. It joins no process group itself: its children do, in each launch another."""

    def body() -> None:
        import json
        import os

        from tasks.artifacts.network_profile import COURSE, CSV, TABLE, write_profile
        from tasks.collectives.engine import benchmark, made_by
        from tasks.collectives.history import History
        from tasks.collectives.launch.crew import Crew
        from tasks.collectives.output import csv_text, table

        measured = benchmark(Crew.from_environment(os.environ, config.timeout), config, reuse=reuse)
        if measured:
            profile, reused = measured
            course = History(config.history, profile.fingerprint).course()
            texts = {TABLE: table(profile), CSV: csv_text(profile), COURSE: json.dumps(course)}
            write_profile(Path(workspace.directory), profile, {**made_by(config), "reused": reused}, texts)

    return workspace.work(body)
