"""Helpers that run a function in a fresh process, or in the ranks of a process group."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

#: Start method: fork from a server with the benchmarks' imports, so that processes start fast.
FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(
    ["torch._dynamo", "slipstream.pipeline.train.run", "slipstream.pipeline.prepare.engine", "scipy.stats", "click"]
)


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function(*arguments)`` in a fresh process and return the result."""
    with ProcessPoolExecutor(1, FRESH) as process:
        return process.submit(function, *arguments).result()


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function(*arguments)`` in a gloo group of ``world`` fresh processes and return rank 0's result.

    Every process has one thread. The result must be serialisable as JSON.
    """
    from torch.multiprocessing import start_processes

    with tempfile.TemporaryDirectory() as scratch:
        start_processes(rank_main, (world, scratch, function, arguments), nprocs=world, start_method="forkserver")
        return json.loads((Path(scratch) / "found.json").read_text())


def rank_main(rank: int, world: int, scratch: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=world)
    found = function(*arguments)
    if rank == 0:
        (Path(scratch) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
