"""The workers of the plugin's Elastic task, forked from a server instead of started one by one.

flytekit's plugin (1.16) knows the start methods "spawn", with which each worker imports torch and flytekit for itself
(5 s), and "fork", which copies the agent with all of its threads. torch elastic knows a fork server as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher import api

from slipstream.distributed import fork_server
from slipstream.distributed.child_processes import no_main_module
from slipstream.distributed.leaving import group_stands, leave
from slipstream.stages import DISTRIBUTED, STAGES
from tasks.flyte.other_pods import with_timeouts
from tasks.flyte.stage import runs_locally

#: The plugin's side of a worker. While torch and the engines are loaded, torch looks into every module that there is,
#: and would so load pandas and PyArrow for flytekit, which otherwise waits until they are used: so they come first.
PLUGIN = ("flytekit.bin.entrypoint", "flytekitplugins.kfpytorch.task")
#: Seconds between two looks of the agent at its workers.
LOOK = 0.1


def start_server(stage: str) -> None:
    """Let the server load what workers of the stage do, while this process does what comes before them. On one machine
    that is what those of any stage do, as the server stays for the next."""
    stages = DISTRIBUTED if runs_locally() else (stage,)
    fork_server.start(("torch", *(engine for each in stages for engine in STAGES[each].engines), *PLUGIN))


class Announced(fork_server.AsNow):
    """Tells this process when the first worker is started, which is when all pods of the job have met; the worker ends
    at once if it fails alone."""

    def __init__(self, target: Callable[..., object], started: Callable[[], None]) -> None:
        super().__init__(target)
        self.started = started

    def __getstate__(self) -> dict[str, object]:
        self.started()
        return super().__getstate__()

    def __call__(self, *arguments: object) -> object:
        try:
            # Leaves the error where torch's agent looks for it, as torch does by itself once this has returned.
            return record(super().__call__)(*arguments)
        except Exception:
            if group_stands():
                leave()
            raise


@contextmanager
def forked_workers(stage: str, patience_s: float, started: Callable[[], None]) -> Iterator[None]:
    """In the block, process groups of the plugin, which looks torch's launcher up whenever it starts one, are made of
    forked workers. Agents wait so many seconds for each other, and ``started`` is called when they have met."""
    launch = api.elastic_launch

    def forking_launch(config: api.LaunchConfig, entrypoint: Callable[..., object]) -> api.elastic_launch:
        start_server(stage)
        patience = with_timeouts(config.rdzv_configs, patience_s)
        forking = replace(config, start_method="forkserver", monitor_interval=LOOK, rdzv_configs=patience)
        return launch(forking, Announced(entrypoint, started))

    api.elastic_launch = forking_launch  # type: ignore[misc, assignment]
    try:
        with no_main_module():
            yield
    finally:
        api.elastic_launch = launch  # type: ignore[misc]
