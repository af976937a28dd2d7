"""Worker: a fresh process of one rank that joins the launch's process group and runs a function.

Workers are forked from a server with torch loaded, see :mod:`slipstream.shared.distributed.fork_server`. The outcomes
of all workers identify the rank at fault.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from slipstream.shared.distributed import fork_server
from slipstream.shared.distributed.user_errors import ErrorMeaning, error_meaning
from slipstream.shared.errors import Interrupted, UserError

if TYPE_CHECKING:
    import torch

#: "refused": user error; "failed": a bug; "died": the process ended without a message; "silent": it hung; "lost":
#: another rank was gone or did not answer. ``WORST`` lists causes before consequences.
Ending = Literal["done", "refused", "failed", "died", "silent", "lost"]
WORST: tuple[Ending, ...] = ("refused", "failed", "died", "silent", "lost")


@dataclass(frozen=True)
class WorkerOutcome:
    """How a worker ended, the reason, and its activity at that time."""

    kind: Ending
    why: str = ""
    during: str = ""


def raise_if_failed(outcomes: Mapping[int, WorkerOutcome], timeout: float) -> None:
    """Raise the outcome that comes first in ``WORST``, the same on all ranks.

    ``UserError`` for a refusal, ``Interrupted`` naming the ranks that died or did not answer, ``RuntimeError`` for a
    bug.
    """
    for kind in WORST:
        found = [rank for rank, outcome in outcomes.items() if outcome.kind == kind]
        if not found:
            continue
        first = outcomes[found[0]]
        if kind == "refused":
            raise UserError(first.why)
        if kind == "failed":
            raise RuntimeError(f"rank {found[0]} failed during {first.during}: {first.why}")
        if kind == "died":
            raise Interrupted(f"{ranks_in_words(found)} died ({first.why}) during {first.during}")
        if kind == "silent":
            raise Interrupted(f"{ranks_in_words(found)} did not continue within {timeout:g} s, during {first.during}")
        raise Interrupted(f"{ranks_in_words(found)} lost the connection during {first.during}: {first.why}")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


#: Function that a worker runs, called with its ``WorkerContext`` and ``Arguments``.
Work: TypeAlias = Callable[..., object]
Arguments: TypeAlias = tuple[object, ...]
PRELOADED = ("torch", "torch.distributed", "numpy", "slipstream.pipeline.collectives.launch.measurements")


@dataclass(frozen=True)
class WorkerSpec:
    """Position of a worker in the process group of a launch."""

    rank: int
    world: int
    local_rank: int
    #: Number of ranks on this machine, which share its cores.
    local_world: int
    #: Address of the parents' TCPStore, and the key prefix of this process group in it.
    host: str
    port: int
    prefix: str
    #: Seconds after which a peer that does not answer counts as lost.
    timeout: float


class WorkerContext:
    """Context passed to a worker's function: its device and activity reports."""

    def __init__(self, device: torch.device, pipe: Connection) -> None:
        self.device = device
        self._pipe = pipe

    def set_activity(self, activity: str) -> None:
        """Report the current activity; the parent names it if this worker fails or hangs."""
        self._pipe.send(("activity", activity))


class WorkerProcess:
    """Handle by which the parent controls a worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        work: Callable[..., object],
        arguments: tuple[object, ...],
    ) -> None:
        self._pipe, worker_end = Pipe(duplex=False)
        fork_server.start_fork_server(PRELOADED)
        self._process = fork_server.start_process(worker_main, (spec, worker_end, environment, work, arguments))
        worker_end.close()
        self.during = "its start"
        self._outcome: WorkerOutcome | None = None
        self.result: Any = None

    def outcome(self, patience: float) -> WorkerOutcome | None:
        """Return the worker's outcome; None if it still runs after ``patience`` seconds."""
        wait([self._pipe, self._process.sentinel], timeout=patience)
        try:
            while self._outcome is None and self._pipe.poll():
                self._receive(*self._pipe.recv())
        except (EOFError, OSError):
            self._process.join()
            self._outcome = WorkerOutcome("died", describe_exit(self._process.exitcode), self.during)
        if self._outcome:
            self._process.join()
        return self._outcome

    def _receive(self, kind: Any, value: Any) -> None:
        if kind == "activity":
            self.during = value
        elif kind == "done":
            self._outcome, self.result = WorkerOutcome("done"), value
        else:
            self._outcome = WorkerOutcome(kind, value, self.during)

    def kill(self) -> WorkerOutcome:
        self._process.kill()
        self._process.join()
        return WorkerOutcome("silent", "", self.during)


def describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        hint = ", which Linux sends when memory runs out" if -code == signal.SIGKILL else ""
        return f"{signal.Signals(-code).name}{hint}"
    return f"exit code {code}"


def worker_main(
    spec: WorkerSpec,
    pipe: Connection,
    environment: Mapping[str, str],
    work: Work,
    arguments: Arguments,
) -> None:
    """Run a worker and send its result or failure to the parent, see ``Ending``."""
    from slipstream.shared.distributed.child_processes import end_with_parent

    end_with_parent()
    os.environ.update(
        environment,
        RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world),
        LOCAL_RANK=str(spec.local_rank),
        LOCAL_WORLD_SIZE=str(spec.local_world),
        MASTER_ADDR=spec.host,
        MASTER_PORT=str(spec.port),
    )
    ending = call_and_report(lambda: run_in_group(spec, pipe, work, arguments))
    pipe.send(ending)
    pipe.close()
    # Skip the destructors of the group's threads, which may wait for peers that are gone.
    os._exit(0)


def call_and_report(call: Callable[[], object]) -> tuple[str, object]:
    """Run ``call`` and return its ending, with the result or the reason of failure."""
    try:
        return "done", call()
    except UserError as error:
        return "refused", error.message
    except Exception as error:
        why = str(error).partition("\n")[0]
        match error_meaning(error):
            case ErrorMeaning.MEMORY:
                return "refused", f"collectives.largest: out of memory ({error}); expected less"
            case ErrorMeaning.BROKEN:
                return "died", why
            case ErrorMeaning.PEER:
                return "lost", why
        return "failed", traceback.format_exc()


def run_in_group(spec: WorkerSpec, pipe: Connection, work: Work, arguments: Arguments) -> object:
    import torch
    import torch.distributed as dist

    from slipstream.shared.distributed.names import names_of_this_machine
    from slipstream.shared.distributed.process_group import process_group
    from slipstream.shared.machine.limits import usable_cores

    torch.set_num_threads(max(1, usable_cores() // spec.local_world))
    patience = timedelta(seconds=spec.timeout)
    with names_of_this_machine(spec.host):
        parents = dist.TCPStore(spec.host, spec.port, is_master=False, timeout=patience)
    with process_group(patience, dist.PrefixStore(spec.prefix, parents)) as group:
        result = work(WorkerContext(group.device, pipe), *arguments)
        dist.barrier()
        return result if spec.rank == 0 else None
