"""Process groups from the environment of torchrun or Flyte's Elastic task, and the exit of a rank that others await."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from slipstream.shared.distributed.names import names_of_this_machine
from slipstream.shared.distributed.user_errors import check_gpus, resolve_backend
from slipstream.shared.errors import Agreed

T = TypeVar("T")
#: References to destroyed groups, kept until the process ends. A group's destructor waits for its threads, which may
#: wait for the GIL to free a tensor. If DDP's reducer dropped the last reference, it would hold the GIL (torch 2.13),
#: and both would deadlock.
_destroyed: list[dist.ProcessGroup | None] = []


@dataclass(frozen=True)
class RankContext:
    """This process's rank, device and backend, and the number of processes."""

    rank: int
    world: int
    device: torch.device
    backend: str


def all_are_here() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def names_while_connecting() -> AbstractContextManager[None]:
    """Look up host names on this machine only, if all processes run on it; for use while connecting.

    With several machines this does nothing: connecting may take minutes, and the preemption watcher must resolve its
    server's name.
    """
    return names_of_this_machine(os.environ.get("MASTER_ADDR", "")) if all_are_here() else nullcontext()


def meeting_store(timeout: timedelta = timedelta(minutes=10)) -> dist.Store:
    """Return the store from the environment in which all processes meet; rank 0 or torch elastic hosts it."""
    with names_while_connecting():
        store, rank, world = next(dist.rendezvous("env://"))
        if all_are_here():
            # torchrun's agent keeps its store for restarted workers, which would read old addresses. On one machine
            # all workers know the same number of restarts, so it prefixes their keys. Agents of several machines count
            # separately (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives every restart a new store there).
            store = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            # Wait for all within the block, because the store's thread looks up the name of every connecting process.
            store.set(f"connected/{rank}", "")
            store.wait([f"connected/{other}" for other in range(world)], timeout)
    return store


@contextmanager
def process_group(
    timeout: timedelta = timedelta(minutes=10), store: dist.Store | None = None, backend: str = "auto"
) -> Iterator[RankContext]:
    """Initialise the process group, and destroy it at the end of the block.

    The backend is NCCL (RCCL on AMD) with a GPU per process, gloo on CPUs, unless ``backend`` names one. The processes
    meet in ``store``, by default the environment's.

    After an exception in the block the group is kept, unless the exception is :class:`~slipstream.shared.errors.Agreed`
    or there are no peers: see :mod:`slipstream.shared.distributed.process_group`.

    Raises ``UserError`` if a machine has GPUs, but fewer than processes, or if ``backend`` is NCCL without GPUs.
    """
    gpus = torch.cuda.device_count()
    check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), gpus)
    backend = resolve_backend(backend, gpus)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    with names_while_connecting():
        dist.init_process_group(
            backend,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
            store=store,
            rank=-1 if store is None else int(os.environ["RANK"]),
            world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
        )
    group = RankContext(dist.get_rank(), dist.get_world_size(), device, backend)
    try:
        yield group
    except BaseException as error:
        if group.world == 1 or isinstance(error, Agreed):
            destroy_process_group()
        raise
    destroy_process_group()


def host_group(group: RankContext) -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks, which needs no GPU memory, for the main thread.

    All ranks must call this.
    """
    return dist.group.WORLD if group.backend == "gloo" else dist.new_group(backend="gloo")


def destroy_process_group() -> None:
    """Destroy the process group, which waits for the peers."""
    _destroyed.append(dist.group.WORLD)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Peers:
    """Rank of this process, and a gloo group for one thread of every rank; ``group`` is None for a single process.

    Every thread needs its own group: on a shared one, collectives of a background thread and of the training loop could
    be matched, and both would deadlock.
    """

    rank: int
    world: int
    group: dist.ProcessGroup | None
    #: Last collective of :meth:`any`, kept until the next call, because releasing a collective right after its end
    #: takes a millisecond.
    _asked: deque[dist.Work] = field(default_factory=lambda: deque(maxlen=1), repr=False, compare=False)

    @classmethod
    def connect(cls, timeout: timedelta) -> Peers:
        """Create the group; all ranks must call this.

        Without an initialised process group, returns a single process.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls(0, 1, None)
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values = [value] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, *here: bool) -> Callable[[], list[bool]]:
        """Start an all-reduce (MAX) of flags; return a function that waits for and returns the results.

        Unlike :meth:`gather` it exchanges no pickles.
        """
        if self.group is None:
            return lambda: list(here)
        flags = torch.tensor(here, dtype=torch.uint8)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._asked.append(work)

        def answer() -> list[bool]:
            work.wait()
            return [bool(each) for each in flags]

        return answer

    def neighbours(self) -> list[int]:
        """Return the ranks on this machine or pod, including this rank.

        Ranks with the same host name and temporary directory are assumed to share one.
        """
        status = Path(tempfile.gettempdir()).stat()
        machines = self.gather((socket.gethostname(), status.st_dev, status.st_ino))
        return [rank for rank, machine in enumerate(machines) if machine == machines[self.rank]]


# Destroying a process group waits for the peers: NCCL's shutdown does not return while they wait for this process in a
# collective, until its watchdog kills them all after ten minutes. So a group is destroyed only if all ranks end
# together. Otherwise it is kept, and the process reports the cause and ends at once. The kernel then closes its
# connections, and the launcher ends the peers.
def group_stands() -> bool:
    """Return True if this process has a process group, so that peers may wait for it."""
    return dist.is_available() and dist.is_initialized()


def exit_at_once() -> NoReturn:
    """Flush the output and end this process with exit code 1, without destructors or joining threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(1)
