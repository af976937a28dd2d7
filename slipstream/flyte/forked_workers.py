"""Workers of flytekit's Elastic task, forked from a server process.

The plugin (1.16) has two start methods: "spawn", with which every worker imports torch and flytekit (5 s), and "fork",
which copies the agent with all of its threads. torch elastic also supports "forkserver", used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher import api

from slipstream.flyte.before_start import with_timeouts
from slipstream.flyte.compat import LAUNCHER
from slipstream.flyte.stage import runs_locally
from slipstream.shared.distributed import fork_server
from slipstream.shared.distributed.child_processes import no_main_module
from slipstream.shared.distributed.process_group import exit_at_once, group_stands
from slipstream.shared.stages import DISTRIBUTED, STAGES

#: Modules of the plugin that a worker imports. They are preloaded after torch and the engines, because importing torch
#: inspects all loaded modules, and would load pandas and PyArrow, which flytekit imports lazily.
PLUGIN = ("flytekit.bin.entrypoint", "flytekitplugins.kfpytorch.task")
#: Interval in seconds at which the agent checks its workers.
LOOK = 0.1


def start_server(stage: str) -> None:
    """Start the fork server in the background, which preloads the modules of a stage's workers.

    A local run preloads the modules of all distributed stages and keeps the server for later stages.
    """
    stages = DISTRIBUTED if runs_locally() else (stage,)
    fork_server.start_fork_server(("torch", *(engine for each in stages for engine in STAGES[each].engines), *PLUGIN))


class AnnouncedCall(fork_server.ForkedCall):
    """Worker entry point that calls ``started`` in the agent and ends a failing worker at once.

    ``started`` is called when the first worker is pickled, thus after the rendezvous of all pods.
    """

    def __init__(self, target: Callable[..., object], started: Callable[[], None]) -> None:
        super().__init__(target)
        self.started = started

    def __getstate__(self) -> dict[str, object]:
        self.started()
        return super().__getstate__()

    def __call__(self, *arguments: object) -> object:
        try:
            # Writes the error where torch's agent looks for it, as torch itself does after this returns.
            return record(super().__call__)(*arguments)
        except Exception:
            if group_stands():
                exit_at_once()
            raise


@contextmanager
def forked_workers(stage: str, patience_s: float, started: Callable[[], None]) -> Iterator[None]:
    """Fork the workers that the plugin starts in the block.

    Agents wait ``patience_s`` seconds for each other; ``started`` is called after their rendezvous.
    """

    def forking(launch: type[api.elastic_launch]) -> Callable[..., api.elastic_launch]:
        def forking_launch(config: api.LaunchConfig, entrypoint: Callable[..., object]) -> api.elastic_launch:
            start_server(stage)
            patience = with_timeouts(config.rdzv_configs, patience_s)
            changed = replace(config, start_method="forkserver", monitor_interval=LOOK, rdzv_configs=patience)
            return launch(changed, AnnouncedCall(entrypoint, started))

        return forking_launch

    with LAUNCHER.applied(forking), no_main_module():
        yield
