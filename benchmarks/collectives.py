"""Our measurement beside a bare torch loop, and beside what memory itself can do.

    python benchmarks/collectives.py [--quick] [--json FILE]

In each of several launches of a process group (figures differ more between launches than within one), and for each
operation and size in turn: a bare loop over the collective with one clock around it, as one would write it first, then
our measurement, then a copy of as many bytes by one process. Reported is the median over the launches of p10, p50 and
the loop's mean. ``ours/loop`` below 1 says how much of the loop's mean is the tail that a median leaves out;
``of memcpy`` is algbw over the bandwidth of the copy, the bound of anything that moves data through memory.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing

from tasks.collectives.config import OPERATIONS
from tasks.collectives.measure import durations_us, measure_one, prepare

WORLD = 2
SIZES = (1 << 10, 256 << 10, 4 << 20, 64 << 20)
CPU = torch.device("cpu")
BUDGET = 0.5


def bare_loop_us(operation: str, size: int, iterations: int) -> float:
    """The mean of a loop without resets, checks or percentiles: the longest over the ranks."""
    case = prepare(operation, size, CPU)
    case.reset()
    case.run()
    started = time.perf_counter()
    for _ in range(iterations):
        case.run()
    mean = torch.tensor([(time.perf_counter() - started) / iterations * 1e6])
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean)


def memcpy_us(size: int) -> float:
    """The median of copying ``size`` bytes."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    taken: list[float] = []
    while len(taken) < 10 or (sum(taken) < 0.1 and len(taken) < 1000):
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


def launch(rank: int, scratch: str, budget: float) -> None:
    """One process of one launch; rank 0 leaves the figures in ``scratch``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=WORLD)
    rows = []
    for operation in OPERATIONS:
        for size in SIZES:
            durations = durations_us(prepare(operation, size, CPU), 5, CPU)
            iterations = max(5, int(budget * 1e6 / float(durations.mean())))
            loop = bare_loop_us(operation, size, iterations)
            ours = measure_one(operation, size, budget, CPU)
            rows.append({**ours, "loop_us": loop, "memcpy_us": memcpy_us(size) if rank == 0 else 0.0})
            dist.barrier()
    if rank == 0:
        (Path(scratch) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def one_launch(budget: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(launch, args=(scratch, budget), nprocs=WORLD)
        return json.loads((Path(scratch) / "rows.json").read_text())


def median_of(launches: list[list[dict[str, Any]]], index: int) -> dict[str, Any]:
    """One operation and size: the medians over the launches, and the ratios of those medians."""
    rows = [launch[index] for launch in launches]
    times = ("p10_us", "p50_us", "loop_us", "memcpy_us")
    row = {key: statistics.median(r[key] for r in rows) for key in times}
    return {
        "operation": rows[0]["operation"],
        "bytes": rows[0]["bytes"],
        **row,
        "algbw_gbps": rows[0]["bytes"] / row["p50_us"] / 1e3,
        "ours_over_loop": row["p50_us"] / row["loop_us"],
        "of_memcpy": row["memcpy_us"] / row["p50_us"],
        "p50_between_launches": [r["p50_us"] for r in rows],
    }


@click.command()
@click.option("--quick", is_flag=True, help="One launch with short measurements instead of five.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures here, too.")
def main(quick: bool, file: Path | None) -> None:
    """Compare our collective benchmark with a bare loop and with memcpy."""
    launches = [one_launch(0.05 if quick else BUDGET) for _ in range(1 if quick else 5)]
    rows = [median_of(launches, index) for index in range(len(launches[0]))]
    print(f"{WORLD} processes, gloo, cpu, torch {torch.__version__}; medians of {len(launches)} launches")
    columns = ("bytes", "p10 us", "p50 us", "loop us", "ours/loop", "GB/s", "of memcpy")
    print(f"{'operation':<15}" + "".join(f"{name:>10}" for name in columns) + f"{'p50 by launch':>20}")
    for r in rows:
        lowest, highest = min(r["p50_between_launches"]), max(r["p50_between_launches"])
        print(
            f"{r['operation']:<15}{r['bytes']:>10}{r['p10_us']:>10.0f}{r['p50_us']:>10.0f}{r['loop_us']:>10.0f}"
            f"{r['ours_over_loop']:>10.2f}{r['algbw_gbps']:>10.3f}{r['of_memcpy']:>10.3f}"
            f"{f'{lowest:.0f} to {highest:.0f}':>20}"
        )
    if file:
        file.write_text(json.dumps({"world": WORLD, "launches": len(launches), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
