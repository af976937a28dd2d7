"""The Flyte tasks of the collective benchmark."""

from __future__ import annotations

from pathlib import Path

from flytekit import Deck, task

from tasks.artifacts.versions import code_version
from tasks.collectives.config import CollectivesConfig
from tasks.flyte.elastic import Workspace, distributed
from tasks.flyte.metadata import WITH_DECK, on
from tasks.flyte.stage import MadeByElement, local_path, map_errors
from tasks.settings import to_dict


@task(task_config=distributed("collectives", returns=MadeByElement.of), **on("collectives"))
def benchmark_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """Measure the interconnect in the same kind of process group that training uses."""

    def body() -> None:
        from tasks.artifacts.network_figures import write_profile
        from tasks.collectives.measure import measure
        from tasks.distributed.process_group import process_group

        with process_group() as group:
            profile = measure(config, group.device)
            if profile:
                made_by = {"config": to_dict(config), "code": code_version("collectives")}
                write_profile(Path(workspace.directory), profile, made_by)

    return workspace.work(body)


@task(**WITH_DECK, **on("report"))
@map_errors
def tabulate(network: MadeByElement) -> str:
    """The measurements as a table of plain text, which is also the task's deck."""
    from html import escape

    from tasks.artifacts.network_figures import read_profile
    from tasks.collectives.table import table

    text = table(read_profile(local_path(network.artifact)))
    Deck("Network", f"<pre>{escape(text)}</pre>")
    return text
