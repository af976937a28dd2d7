"""Our measurement of collectives, compared with a bare torch loop and with the memory bandwidth.

    python benchmarks/collectives.py [OPTIONS]

Every launch of a process group measures each operation and size three times: by our timing code, by a bare loop of
equally many iterations that is timed as a whole, and by a memcpy of equally many bytes in one process. Figures are
medians over several launches, because they differ more between launches than within one launch. ``p50/loop`` is our
median over the loop's mean; a value below 1 shows the tail of slow iterations, which a median ignores. ``PARAM`` is the
mean over iterations, tail included, that PARAM (github.com/facebookresearch/param, comms) computes from the same raw
times; its percentiles are over ranks and cannot show the tail. ``of memcpy`` is algbw over memcpy's bandwidth, the
upper bound of any transfer through memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from harness.command import benchmark
from harness.processes import on_ranks
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, medians
from slipstream.pipeline.collectives.config import OPERATIONS
from slipstream.pipeline.collectives.launch.timing import run_cases, slowest_rank_seconds, time_cases
from slipstream.pipeline.collectives.operations.cases import ALWAYS_IN_PLACE, REDUCING, OperationKind, prepare_case

WORLD = 2
SIZES = (1 << 10, 256 << 10, 4 << 20, 64 << 20)
CPU = torch.device("cpu")
BUDGET = 0.5
KINDS = tuple(
    OperationKind(operation, reduction="sum" if operation in REDUCING else "", in_place=operation in ALWAYS_IN_PLACE)
    for operation in OPERATIONS
    if operation != "barrier"
)


def bare_loop_us(kind: OperationKind, size: int, iterations: int) -> float:
    """Return the mean microseconds per iteration of a loop that is timed as a whole, as the maximum over the ranks."""
    case = prepare_case(kind, size, CPU)
    case.clear()
    run_cases([case])
    started = time.perf_counter()
    for _ in range(iterations):
        run_cases([case])
    mean = (time.perf_counter() - started) / iterations * 1e6
    return float(slowest_rank_seconds(np.array([mean]), CPU)[0])


def memcpy_us(size: int) -> float:
    """Return the median time of copying ``size`` bytes, in microseconds."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    taken: list[float] = []
    while len(taken) < 10 or (sum(taken) < 0.1 and len(taken) < 1000):
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


def launch(sizes: Sequence[int], budget: float) -> dict[str, Figures]:
    """Measure every operation at every size on this rank of a launch; ``budget`` is in seconds per case."""
    rows = {}
    for kind in KINDS:
        for size in sizes:
            case = prepare_case(kind, size, CPU)
            ours = np.array(time_cases([case], "loop", budget, CPU).seconds) * 1e6
            loop = bare_loop_us(kind, size, len(ours))
            rows[f"{kind.operation} {case.bytes}"] = {
                "bytes": case.bytes,
                "p10_us": float(np.percentile(ours, 10)),
                "p50_us": float(np.median(ours)),
                "mean_us": float(ours.mean()),
                "loop_us": loop,
                "memcpy_us": memcpy_us(size) if dist.get_rank() == 0 else 0.0,
            }
            dist.barrier()
    return rows


def summary(launches: Sequence[Figures]) -> Figures:
    row = medians(launches)
    p50 = [launch["p50_us"] for launch in launches]
    return {
        **row,
        "algbw_gbps": row["bytes"] / row["p50_us"] / 1e3,
        "ours_over_loop": row["p50_us"] / row["loop_us"],
        "mean_over_p50": row["mean_us"] / row["p50_us"],
        "of_memcpy": row["memcpy_us"] / row["p50_us"],
        "p50_us_least": min(p50),
        "p50_us_most": max(p50),
    }


COLUMNS = (
    Column("p10 us", "p10_us", "{:.0f}"),
    Column("p50 us", "p50_us", "{:.0f}"),
    Column("loop us", "loop_us", "{:.0f}"),
    Column("p50/loop", "ours_over_loop", "{:.2f}"),
    Column("PARAM", "mean_us", "{:.0f}"),
    Column("PARAM/p50", "mean_over_p50", "{:.2f}"),
    Column("GB/s", "algbw_gbps", "{:.3f}"),
    Column("of memcpy", "of_memcpy", "{:.3f}"),
    Column("least p50", "p50_us_least", "{:.0f}"),
    Column("most p50", "p50_us_most", "{:.0f}"),
)


@benchmark
def main(quick: bool) -> Iterator[Table]:
    """Compare our measurement of collectives with a bare loop and with memcpy."""
    sizes, budget, count = (SIZES[:2], 0.01, 1) if quick else (SIZES, BUDGET, 5)
    launches = [on_ranks(WORLD, launch, sizes, budget) for _ in range(count)]
    rows = {name: summary([launch[name] for launch in launches]) for name in launches[0]}
    yield Table(f"{WORLD} processes, gloo, cpu; bytes; medians of {count} launches", COLUMNS, rows)


if __name__ == "__main__":
    main()
