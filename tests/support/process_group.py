"""A process group of real processes for a test to run a function in."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def in_world(world: int, scratch: Path, function: Callable[[], Any]) -> list[Any]:
    """What ``function`` (of a module, so that a spawned process finds it) returns on each rank of a gloo group."""
    torch.multiprocessing.spawn(run_rank, args=(world, str(scratch), function), nprocs=world)
    return [pickle.loads((scratch / str(rank)).read_bytes()) for rank in range(world)]


def run_rank(rank: int, world: int, scratch: str, function: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=world, timeout=timeout)
    result = function()
    (Path(scratch) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
