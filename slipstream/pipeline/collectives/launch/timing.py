"""Timing of one case in the current process group.

Clocks are not compared across ranks: every rank times its own iterations, and the longest time over the ranks counts.
Buffers are not reset between iterations, which would cool caches and add the ranks' different reset times. In mode
"loop" iterations follow one another. In mode "barrier" a barrier precedes each, so its time includes the skew of
leaving the barrier (relevant at small sizes).

CUDA events around a single small call would include its launch, since the GPU is idle until then. So in mode "loop" a
pair of events encloses as many calls as take ``READING_S``, and their mean counts as one iteration, as in nccl-tests.

Iterations continue until the median is known to within ``NARROW`` or the time is over. All ranks decide alike, from the
longest times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from slipstream.pipeline.collectives.operations.cases import OperationCase
from slipstream.shared.distributed.user_errors import same_error_on_all_ranks
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.profile import Launch, Mode

#: Iterations before a case is measured: the first call of an operation opens connections and may take 50,000 times as
#: long.
WARM_UP = 3
#: Seconds of warm-up in fresh processes. Their first few hundred iterations take up to three times as long, until clock
#: rates, the allocator and socket buffers have adapted.
WARM_UP_S = 0.3
#: Lower bound in seconds for a measured time, below any clock's resolution: with a single rank NCCL launches nothing.
SHORTEST_S = 1e-7
#: Required half width of the median's 95 % interval, relative to the median.
NARROW = 0.02
#: Iterations from which the interval is trusted, and minimum and maximum number of iterations.
BELIEVED, FEWEST, MOST = 20, 5, 5000
#: Minimum seconds between two CUDA events, and maximum calls between them.
READING_S, MOST_CALLS = 0.001, 200
#: Fraction of the time budget after which the ranks decide again whether to continue.
BLOCK = 0.2


def time_cases(cases: Sequence[OperationCase], mode: Mode, budget: float, device: torch.device) -> Launch:
    """Time the ``cases``, started together, for about ``budget`` seconds at most.

    All ranks call this and get the same result. Outputs are checked before and after; ``AgreedUserError`` is raised on
    all ranks if one is wrong.
    """
    for _ in range(WARM_UP):
        run_cases(cases)
    check_cases(cases)
    for case in cases:
        case.clear()
    longest, own = np.empty(0), np.empty(0)
    count, calls = FEWEST, calls_of_a_reading(cases, mode, device)
    while True:
        mine = np.array(time_block(cases, mode, count, device, calls))
        longest, own = np.concatenate([longest, slowest_rank_seconds(mine, device)]), np.concatenate([own, mine])
        if narrow := is_narrow(longest):
            break
        left = budget - calls * longest.sum()
        if left <= 0 or len(longest) >= MOST:
            break
        fitting = min(left, BLOCK * budget) / (calls * float(np.median(longest)))
        count = int(np.clip(fitting, 1, MOST - len(longest)))
    check_cases(cases)
    medians: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(medians, round(float(np.median(own)), 9))
    return Launch(tuple(round(float(seconds), 9) for seconds in longest), narrow, tuple(medians))


def warm_up(case: OperationCase, device: torch.device) -> None:
    """Run ``case`` for ``WARM_UP_S`` seconds; all ranks call this."""
    case.clear()
    spent, count = 0.0, FEWEST
    while spent < WARM_UP_S:
        block = slowest_rank_seconds(np.array(time_block([case], "loop", count, device)), device)
        spent += float(block.sum())
        count = int(np.clip(WARM_UP_S / 10 / max(SHORTEST_S, float(np.median(block))), 1, MOST))


def run_cases(cases: Sequence[OperationCase]) -> None:
    works = [work for case in cases for work in case.start()]
    for work in works:
        if work is not None:
            work.wait()


def is_narrow(seconds: np.ndarray) -> bool:
    """Return True if the median is known to within ``NARROW``.

    The interval comes from order statistics, without assuming a distribution.
    """
    count = len(seconds)
    if count < BELIEVED:
        return False
    ordered, half = np.sort(seconds), 0.98 * count**0.5
    low, high = ordered[max(0, int(count / 2 - half))], ordered[min(count - 1, int(np.ceil(count / 2 + half)))]
    return bool(high - low <= 2 * NARROW * np.median(ordered))


def slowest_rank_seconds(seconds: np.ndarray, device: torch.device) -> np.ndarray:
    """Return every iteration's longest time over the ranks; equal on all ranks."""
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.cpu().numpy()


def calls_of_a_reading(cases: Sequence[OperationCase], mode: Mode, device: torch.device) -> int:
    """Return the number of calls between two clock readings; equal on all ranks."""
    if device.type != "cuda" or mode == "barrier":
        return 1
    once = slowest_rank_seconds(np.array(time_block(cases, mode, FEWEST, device)), device)
    return int(np.clip(np.ceil(READING_S / max(SHORTEST_S, float(np.median(once)))), 1, MOST_CALLS))


def time_block(
    cases: Sequence[OperationCase], mode: Mode, count: int, device: torch.device, calls: int = 1
) -> list[float]:
    """Return the seconds of ``count`` iterations by this rank's clock.

    An iteration is one call; on a GPU it is the mean of ``calls`` calls.
    """
    dist.barrier()
    return time_on_gpu(cases, mode, count, calls) if device.type == "cuda" else time_on_cpu(cases, mode, count)


def time_on_cpu(cases: Sequence[OperationCase], mode: Mode, count: int) -> list[float]:
    """Time by the wall clock: a gloo operation is complete when ``wait`` returns."""
    seconds = []
    for _ in range(count):
        if mode == "barrier":
            dist.barrier()
        started = time.perf_counter_ns()
        run_cases(cases)
        seconds.append((time.perf_counter_ns() - started) / 1e9)
    return seconds


def time_on_gpu(cases: Sequence[OperationCase], mode: Mode, count: int, calls: int) -> list[float]:
    """Time iterations of ``calls`` calls with CUDA events on the current stream.

    The current stream waits for the communication stream, so the events include the communication.
    """
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for started, ended in events:
        if mode == "barrier":
            dist.barrier()
        started.record()
        for _ in range(calls):
            run_cases(cases)
        ended.record()
    torch.cuda.synchronize()
    return [started.elapsed_time(ended) / 1e3 / calls for started, ended in events]


def check_cases(cases: Sequence[OperationCase]) -> None:
    """Run the cases on reference data and check this rank's output.

    Raises ``AgreedUserError`` on all ranks if the output of any rank is wrong.
    """
    for case in cases:
        case.fill()
    dist.barrier()
    run_cases(cases)
    if cases[0].target.is_cuda:
        torch.cuda.synchronize()
    with same_error_on_all_ranks():
        for case in cases:
            if wrong := case.first_wrong():
                at, found, wanted = wrong
                raise UserError(
                    f"{case.kind} of {case.bytes} bytes is wrong on rank {dist.get_rank()}: element {at} is {found} "
                    f"instead of {wanted}; check the interconnect and the settings of {dist.get_backend()}"
                )
