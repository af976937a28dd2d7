"""The door of the collective benchmark."""

from __future__ import annotations

from pathlib import Path

from flytekit import task

from tasks.collectives.config import CollectivesConfig
from tasks.hardware.elastic import Workspace, distributed
from tasks.hardware.on import on
from tasks.settings import to_dict
from tasks.stage import Made
from tasks.versions import code_version


@task(task_config=distributed("collectives"), **on("collectives"))
def benchmark_collectives(workspace: Workspace, config: CollectivesConfig) -> Made:
    """Measure the interconnect in the same kind of process group that training uses."""

    def body() -> None:
        from tasks.collectives.measure import measure
        from tasks.collectives.profile import write_profile
        from tasks.group import process_group

        with process_group() as group:
            profile = measure(config, group.device)
            if profile:
                made_by = {"config": to_dict(config), "code": code_version("collectives")}
                write_profile(Path(workspace.directory), profile, made_by)

    return workspace.work(body)
