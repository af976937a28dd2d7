"""A worker: a fresh process of one rank, which joins the process group of the launch, runs a function and reports.

It is forked from a server that has imported torch and nothing else, so that starting one takes a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from slipstream.collectives.launch.outcome import Outcome
from slipstream.distributed.child_processes import no_main_module
from slipstream.errors import UserError

# c10d warns at length of peers that went away, which is what the parents say in one line. Read when torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["torch", "torch.distributed", "numpy", "slipstream.collectives.launch.measurements"])


@dataclass(frozen=True)
class WorkerSpec:
    """The place of a worker in the process group of a launch."""

    rank: int
    world: int
    local_rank: int
    #: Number of ranks on this machine, which share its cores.
    local_world: int
    #: The address of the parents' store, and the prefix of the keys of this process group in it.
    host: str
    port: int
    prefix: str
    #: Seconds to wait for a peer.
    timeout: float


class WorkerContext:
    """What the function of a worker gets: the device, and a way to report its current activity."""

    def __init__(self, device: Any, pipe: Connection) -> None:
        self.device = device
        self._pipe = pipe

    def set_activity(self, activity: str) -> None:
        """Tell the parent, which names the activity in its error if this worker fails or hangs."""
        self._pipe.send(("activity", activity))


class WorkerProcess:
    """The parent's handle of a worker."""

    def __init__(
        self, spec: WorkerSpec, environment: Mapping[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self._pipe, worker_end = FRESH.Pipe(duplex=False)
        # The fork server still has the environment that it was started with.
        variables = {**os.environ, **environment}
        self._process = FRESH.Process(target=worker_main, args=(spec, worker_end, variables, work, arguments))
        with no_main_module():
            self._process.start()
        worker_end.close()
        self.during = "its start"
        self._outcome: Outcome | None = None
        self.result: Any = None

    def outcome(self, patience: float) -> Outcome | None:
        """How the worker ended; None if it is still running after ``patience`` seconds."""
        wait([self._pipe, self._process.sentinel], timeout=patience)
        try:
            while self._outcome is None and self._pipe.poll():
                self._receive(*self._pipe.recv())
        except (EOFError, OSError):
            self._process.join()
            self._outcome = Outcome("died", describe_exit(self._process.exitcode), self.during)
        if self._outcome:
            self._process.join()
        return self._outcome

    def _receive(self, kind: Any, value: Any) -> None:
        if kind == "activity":
            self.during = value
        elif kind == "done":
            self._outcome, self.result = Outcome("done"), value
        else:
            self._outcome = Outcome(kind, value, self.during)

    def kill(self) -> Outcome:
        self._process.kill()
        self._process.join()
        return Outcome("silent", "", self.during)


def describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        hint = ", which Linux sends when memory runs out" if -code == signal.SIGKILL else ""
        return f"{signal.Signals(-code).name}{hint}"
    return f"exit code {code}"


def worker_main(
    spec: WorkerSpec,
    pipe: Connection,
    environment: Mapping[str, str],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """The main function of a worker: its last message is "done", "refused", "lost" or "failed"."""
    from slipstream.distributed.child_processes import end_with_parent

    end_with_parent()
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world),
        LOCAL_RANK=str(spec.local_rank),
        LOCAL_WORLD_SIZE=str(spec.local_world),
        MASTER_ADDR=spec.host,
        MASTER_PORT=str(spec.port),
    )
    ending = ending_of(lambda: run_in_group(spec, pipe, work, arguments))
    pipe.send(ending)
    pipe.close()
    # Skips the destructors of the group's threads, which may wait for peers that are gone.
    os._exit(0)


def ending_of(call: Callable[[], Any]) -> tuple[str, Any]:
    """How ``call`` ended, and its result or the reason why it failed."""
    try:
        return "done", call()
    except UserError as error:
        return "refused", error.message
    except Exception as error:
        return ("lost", str(error).partition("\n")[0]) if lost_peer(error) else ("failed", traceback.format_exc())


def run_in_group(spec: WorkerSpec, pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    from slipstream.distributed.names import names_of_this_machine
    from slipstream.distributed.process_group import process_group
    from slipstream.machine.limits import usable_cores

    torch.set_num_threads(max(1, usable_cores() // spec.local_world))
    patience = timedelta(seconds=spec.timeout)
    with names_of_this_machine(spec.host):
        parents = dist.TCPStore(spec.host, spec.port, is_master=False, timeout=patience)
    with process_group(patience, dist.PrefixStore(spec.prefix, parents)) as group:
        result = work(WorkerContext(group.device, pipe), *arguments)
        dist.barrier()
        return result if spec.rank == 0 else None


def lost_peer(error: Exception) -> bool:
    """Whether another rank went away or did not answer. gloo raises plain ``RuntimeError``s that name its source."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo/" in str(error)
