"""The process group, from the environment that torchrun or Flyte's Elastic sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

#: Groups that have ended, never let go. A group's destructor waits for its threads, and these may wait for Python's
#: lock to drop a tensor. Python's own handle gives the lock up first, DDP's reducer does not (torch 2.13): were the
#: reducer the last to hold the group, all would wait for ever.
_ended: list[dist.ProcessGroup | None] = []


@dataclass(frozen=True)
class Group:
    """This process's place in the world and the device it computes on."""

    rank: int
    world: int
    device: torch.device
    backend: str


@contextmanager
def process_group(timeout: timedelta = timedelta(minutes=10)) -> Iterator[Group]:
    """Join the process group: NCCL (RCCL on AMD) with a GPU per process, gloo on CPUs."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, timeout=timeout, device_id=device if gpus else None)
    try:
        yield Group(dist.get_rank(), dist.get_world_size(), device, backend)
    finally:
        _ended.append(dist.group.WORLD)
        dist.destroy_process_group()
