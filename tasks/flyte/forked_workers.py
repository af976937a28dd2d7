"""The workers of the plugin's Elastic task, forked from a server instead of started one by one.

flytekit's plugin (1.16) knows the start methods "spawn", with which each worker imports torch and flytekit for itself
(5 s), and "fork", which copies the agent with all of its threads. torch elastic knows a fork server as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed.launcher import api

from slipstream.distributed import fork_server
from slipstream.distributed.child_processes import no_main_module
from slipstream.stages import DISTRIBUTED, STAGES

#: What every worker loads: the plugin's side of it, and the engines.
PRELOADED = (
    "torch",
    "flytekit.bin.entrypoint",
    "flytekitplugins.kfpytorch.task",
    *(engine for stage in DISTRIBUTED for engine in STAGES[stage].engines),
)
#: Seconds between two looks of the agent at its workers.
LOOK = 0.1


def start_server() -> None:
    """Let the server load, while this process does what comes before its workers."""
    fork_server.start(PRELOADED)


@contextmanager
def forked_workers() -> Iterator[None]:
    """In the block, process groups of the plugin, which looks torch's launcher up whenever it starts one, are made of
    forked workers."""
    launch = api.elastic_launch

    def forking_launch(config: api.LaunchConfig, entrypoint: Callable[..., object]) -> api.elastic_launch:
        start_server()
        forking = replace(config, start_method="forkserver", monitor_interval=LOOK)
        return launch(forking, fork_server.AsNow(entrypoint))

    api.elastic_launch = forking_launch  # type: ignore[misc, assignment]
    try:
        with no_main_module():
            yield
    finally:
        api.elastic_launch = launch  # type: ignore[misc]
