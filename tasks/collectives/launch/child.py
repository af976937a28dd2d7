"""A child of one rank: a fresh process that joins the group of the other ranks' children, works, and says how it went.

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

from tasks.collectives.launch.outcome import Outcome
from tasks.distributed.main_module import no_main_module
from tasks.errors import UserError

# c10d warns at length of peers that went away, which is what the parents say in one line. Read when torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["torch", "torch.distributed", "numpy", "tasks.collectives.launch.one_launch"])


@dataclass(frozen=True)
class Seat:
    """A child's place in its group."""

    rank: int
    world: int
    local_rank: int
    #: Ranks on this machine, which share its cores.
    local_world: int
    #: Where the parents' store is, and the prefix under which the children meet.
    host: str
    port: int
    prefix: str
    #: Seconds after which a peer that does not answer is given up.
    timeout: float


class Work:
    """What a child works with: its device, and how it says what it is doing."""

    def __init__(self, device: Any, pipe: Connection) -> None:
        self.device = device
        self._pipe = pipe

    def at(self, doing: str) -> None:
        """Tell the parent, who names it if this process does not go on."""
        self._pipe.send(("at", doing))


class Running:
    """A child as its parent sees it."""

    def __init__(
        self, seat: Seat, environment: Mapping[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self._pipe, its = FRESH.Pipe(duplex=False)
        # The fork server has the environment of when it was started.
        whole = {**os.environ, **environment}
        self._process = FRESH.Process(target=live, args=(seat, its, whole, work, arguments))
        with no_main_module():
            self._process.start()
        its.close()
        self.during = "its start"
        self._outcome: Outcome | None = None
        self.result: Any = None

    def outcome(self, patience: float) -> Outcome | None:
        """How it ended; None if it has not, having listened for at most ``patience`` seconds."""
        wait([self._pipe, self._process.sentinel], timeout=patience)
        try:
            while self._outcome is None and self._pipe.poll():
                self._hear(*self._pipe.recv())
        except (EOFError, OSError):
            self._process.join()
            self._outcome = Outcome("died", how_it_died(self._process.exitcode), self.during)
        if self._outcome:
            self._process.join()
        return self._outcome

    def _hear(self, kind: Any, value: Any) -> None:
        if kind == "at":
            self.during = value
        elif kind == "done":
            self._outcome, self.result = Outcome("done"), value
        else:
            self._outcome = Outcome(kind, value, self.during)

    def kill(self) -> Outcome:
        self._process.kill()
        self._process.join()
        return Outcome("silent", "", self.during)


def how_it_died(code: int | None) -> str:
    if code is not None and code < 0:
        hint = ", which Linux sends when memory runs out" if -code == signal.SIGKILL else ""
        return f"{signal.Signals(-code).name}{hint}"
    return f"exit code {code}"


def live(
    seat: Seat, pipe: Connection, environment: Mapping[str, str], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """The life of a child: its last word to the parent is "done", "refused", "lost" or "failed"."""
    from tasks.distributed.parent_death import end_with_parent

    end_with_parent()
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world),
        LOCAL_RANK=str(seat.local_rank),
        LOCAL_WORLD_SIZE=str(seat.local_world),
        MASTER_ADDR=seat.host,
        MASTER_PORT=str(seat.port),
    )
    ending = attempt(lambda: in_group(seat, pipe, work, arguments))
    pipe.send(ending)
    pipe.close()
    # Without the destructors of the group's threads, which may wait for peers that are gone.
    os._exit(0)


def attempt(do: Callable[[], Any]) -> tuple[str, Any]:
    """The last word: how ``do`` ended, and its result or the reason."""
    try:
        return "done", do()
    except UserError as error:
        return "refused", error.message
    except Exception as error:
        return ("lost", str(error).partition("\n")[0]) if lost_peer(error) else ("failed", traceback.format_exc())


def in_group(seat: Seat, pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    from tasks.distributed.names import names_of_this_machine
    from tasks.distributed.process_group import process_group
    from tasks.hardware.cpus import usable_cores

    torch.set_num_threads(max(1, usable_cores() // seat.local_world))
    patience = timedelta(seconds=seat.timeout)
    with names_of_this_machine(seat.host):
        parents = dist.TCPStore(seat.host, seat.port, is_master=False, timeout=patience)
    with process_group(patience, dist.PrefixStore(seat.prefix, parents)) as group:
        result = work(Work(group.device, pipe), *arguments)
        dist.barrier()
        return result if seat.rank == 0 else None


def lost_peer(error: Exception) -> bool:
    """Whether another rank went away or did not answer. gloo raises plain ``RuntimeError``s that name its source."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo/" in str(error)
