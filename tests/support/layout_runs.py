"""Trainings under a layout on real processes, and faults that the comparison with one process has to find."""

import contextlib
import functools
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from slipstream.operations.proofs.gpu import layouts
from slipstream.operations.proofs.gpu.layouts import PATIENCE, PATIENCE_S, LayoutCase, LayoutResult, train_divided
from slipstream.operations.proofs.processes import FORK, free_port


def break_something(fault: str) -> None:
    """Put in an error that the comparison has to find."""
    from slipstream.pipeline.train.checkpoint.staging import local_tensor
    from slipstream.pipeline.train.parallel import divide

    if fault == "lost factor":
        layouts.loss_factor = lambda ranks, rows: 1.0
    elif fault == "clip by stage":

        def stage_norm(parameters: Any, layout: Any, counted_elsewhere: Any = ()) -> Tensor:
            return torch.nn.utils.get_total_norm([local_tensor(p.grad) for p in parameters])

        divide.total_norm = stage_norm
    elif fault == "tensor gradient not summed":

        def relabel(parameters: Any, layout: Any) -> None:
            for p in (p for p in parameters if Partial() in p.grad.placements):
                p.grad = DTensor.from_local(p.grad.to_local(), p.device_mesh, p.placements, run_check=False)

        divide.sum_partial_gradients = relabel
    elif fault == "tied gradient not summed":
        from slipstream.pipeline.train.parallel.pipeline import Pipeline

        Pipeline._add_shared = lambda self: None  # type: ignore[method-assign]


def run_rank(
    function: Callable[[], Any], rank: int, world: int, port: int, backend: str, fault: str, out: Path
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if backend:
            dist.init_process_group(backend, timeout=PATIENCE)
        break_something(fault)
        result: Any = function()
        if backend:
            dist.barrier()
    except BaseException:
        result = traceback.format_exc()
    (out / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    # Without the destructors of groups, which may wait for a peer that has failed.
    os._exit(0)


def on_ranks(
    world: int, function: Callable[[], Any], out: Path, fault: str = "", *, backend: str = "gloo", killed: bool = False
) -> list[Any]:
    """What ``function`` returns on each rank of a group of new processes, which it joins itself if ``backend`` is "".
    Raises if one of them did, unless ``killed``, when at least one has to kill itself."""
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    arguments = [(function, rank, world, port, backend, fault, out) for rank in range(world)]
    ranks = [FORK.Process(target=run_rank, args=a) for a in arguments]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(4 * PATIENCE_S)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if killed:
        assert any(process.exitcode for process in ranks), "at least one was killed"
        return []
    results = [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in range(world)]
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise RuntimeError(f"{len(failed)} of {world} ranks failed:\n{failed[0]}")
    return results


def each_in_turn(cases: Sequence[LayoutCase]) -> list[LayoutResult]:
    """One rank's part of several cases of the same number of processes."""
    return [train_divided(case) for case in cases]


def divided(case: LayoutCase, out: Path, fault: str = "") -> list[LayoutResult]:
    """Return the result of every rank of the case's layout."""
    backend = "nccl" if case.device == "cuda" else "gloo"
    return on_ranks(case.world, functools.partial(train_divided, case), out, fault, backend=backend)
