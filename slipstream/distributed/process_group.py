"""The process group, initialised from the environment that torchrun or Flyte's Elastic task sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.distributed.devices import backend_of, check_gpus
from slipstream.distributed.names import names_of_this_machine

#: References to destroyed groups, kept until the process ends. A group's destructor waits for its threads, and these
#: may wait for the GIL to free a tensor. Python's reference releases the GIL first, DDP's reducer does not (torch
#: 2.13): if the reducer dropped the last reference, both would wait for ever.
_destroyed: list[dist.ProcessGroup | None] = []


@dataclass(frozen=True)
class Group:
    """This process's rank, the number of processes, and the device that it computes on."""

    rank: int
    world: int
    device: torch.device
    backend: str


def all_are_here() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def names_while_connecting() -> AbstractContextManager[None]:
    """Names of this machine, if all processes are on it. Waiting for another one may take minutes, in which the watcher
    for notices has to find its server by name."""
    return names_of_this_machine(os.environ.get("MASTER_ADDR", "")) if all_are_here() else nullcontext()


def meeting_store(timeout: timedelta = timedelta(minutes=10)) -> dist.Store:
    """The store in which all processes meet, as the environment says; without torch elastic's own, rank 0 hosts it."""
    with names_while_connecting():
        store, rank, world = next(dist.rendezvous("env://"))
        if all_are_here():
            # The thread of the store asks for the name of each process that connects to it.
            store.set(f"connected/{rank}", "")
            store.wait([f"connected/{other}" for other in range(world)], timeout)
    return store


@contextmanager
def process_group(
    timeout: timedelta = timedelta(minutes=10), store: dist.Store | None = None, backend: str = "auto"
) -> Iterator[Group]:
    """Initialise the process group: NCCL (RCCL on AMD) with a GPU per process, gloo on CPUs, unless ``backend`` names
    one. The processes meet in ``store``, or without one in that of the environment.

    Raises ``UserError`` if there are more processes than GPUs on a machine that has some, or none for NCCL.
    """
    gpus = torch.cuda.device_count()
    check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), gpus)
    backend = backend_of(backend, gpus)
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
    try:
        yield Group(dist.get_rank(), dist.get_world_size(), device, backend)
    finally:
        _destroyed.append(dist.group.WORLD)
        dist.destroy_process_group()
