"""Measure collective operations in the process group that this code runs in.

No clocks are compared across ranks. Each rank times every iteration by itself; an iteration counts as long as on the
slowest rank. There is no barrier between iterations, because ranks leave a barrier at times that differ by more than a
small collective takes. Inputs are reset between iterations, outside the measured time.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch
import torch.distributed as dist

from tasks.artifacts.network_figures import Measurement, NetworkProfile
from tasks.collectives.config import CollectivesConfig
from tasks.collectives.operations import CASES, Case, bus_factor
from tasks.distributed.agreement import same_error_on_all_ranks
from tasks.errors import UserError

#: Runs before the measurement: the first call of an operation opens connections and may take 50,000 times as long.
WARM_UP = 3
#: Iterations of the pilot run, which tells how many iterations fit the budget.
PILOT = 5
FEWEST, MOST = 10, 5000


def measure(config: CollectivesConfig, device: torch.device) -> NetworkProfile | None:
    """Measure every operation at every size. All ranks of the initialised group call it; rank 0 gets the profile.

    Raises the same ``AgreedUserError`` on all ranks if a result is wrong or a size does not fit into memory.
    """
    measurements = [
        measure_one(operation, size, config.budget, device) for operation in config.operations for size in config.sizes
    ]
    if dist.get_rank() != 0:
        return None
    world = dist.get_world_size()
    all_reduces = [m for m in measurements if m["operation"] == "all_reduce"]
    return {
        "world": world,
        "nodes": max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world))),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "measurements": measurements,
        "summary": {
            "all_reduce_latency_us": all_reduces[0]["p50_us"] if all_reduces else None,
            "all_reduce_busbw_gbps": all_reduces[-1]["busbw_gbps"] if all_reduces else None,
        },
    }


def measure_one(operation: str, size: int, budget: float, device: torch.device) -> Measurement:
    """Measure one operation at one size for about ``budget`` seconds; equal on all ranks."""
    world = dist.get_world_size()
    with same_error_on_all_ranks():
        case = prepare(operation, size, device)
    for _ in range(WARM_UP):
        case.reset()
        case.run()
    check(case)
    # The pilot's times are equal on all ranks, and so is the number of iterations computed from them.
    pilot = float(np.median(durations_us(case, PILOT, device)))
    iterations = int(np.clip(budget * 1e6 / pilot, FEWEST, MOST))
    p10, p50, p99 = np.percentile(durations_us(case, iterations, device), (10, 50, 99))
    check(case)
    algbw = case.bytes / (p50 * 1e3)
    return {
        "operation": operation,
        "bytes": case.bytes,
        "iterations": iterations,
        "p10_us": round(float(p10), 3),
        "p50_us": round(float(p50), 3),
        "p99_us": round(float(p99), 3),
        "algbw_gbps": round(float(algbw), 6),
        "busbw_gbps": round(float(algbw * bus_factor(operation, world)), 6),
        "correct": True,  # otherwise check() would have raised
    }


def prepare(operation: str, size: int, device: torch.device) -> Case:
    """Allocate the buffers of one case. Raises ``UserError`` if they do not fit into memory."""
    try:
        return CASES[operation](dist.get_rank(), dist.get_world_size(), size, device)
    except (RuntimeError, MemoryError):  # torch's CPU allocator raises RuntimeError, CUDA's a subclass of it
        raise UserError(
            f"collectives.largest: the buffers of {operation} at {size} bytes do not fit into the memory of "
            f"{device.type} on rank {dist.get_rank()}; choose a smaller size"
        ) from None


def check(case: Case) -> None:
    """Raise ``AgreedUserError`` on all ranks unless the output of the last run is right on every rank."""
    with same_error_on_all_ranks():
        wrong = torch.nonzero(case.output != case.expected)
        if len(wrong):
            at = int(wrong[0])
            raise UserError(
                f"{case.operation} of {case.bytes} bytes is wrong on rank {dist.get_rank()} at position {at}: "
                f"{case.output[at].item():g} instead of {case.expected[at].item():g} ({len(wrong)} of "
                f"{case.output.numel()} elements differ); check the network and the settings of {dist.get_backend()}"
            )


def durations_us(case: Case, iterations: int, device: torch.device) -> np.ndarray:
    """Microseconds of each iteration on the slowest rank; float64 ``[iterations]``, equal on all ranks."""
    times = time_on_gpu(case, iterations) if device.type == "cuda" else time_on_cpu(case, iterations)
    longest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.cpu().numpy()


def time_on_cpu(case: Case, iterations: int) -> list[float]:
    """Microseconds by the wall clock; with gloo an operation has finished when its call returns."""
    times = []
    for _ in range(iterations):
        case.reset()
        started = time.perf_counter_ns()
        case.run()
        times.append((time.perf_counter_ns() - started) / 1e3)
    return times


def time_on_gpu(case: Case, iterations: int) -> list[float]:
    """Microseconds by CUDA events on the current stream, which waits for the stream of the communication."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for started, ended in events:
        case.reset()
        started.record()
        case.run()
        ended.record()
    torch.cuda.synchronize()
    return [started.elapsed_time(ended) * 1e3 for started, ended in events]
