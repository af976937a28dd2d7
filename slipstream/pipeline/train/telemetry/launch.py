"""Overhead of a pass that does not depend on its rows: kernel launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from slipstream.pipeline.train.device_clock import DeviceClock
from slipstream.pipeline.train.loop.probe import ROWS, unchanged_after
from slipstream.pipeline.train.parallel.model import Forward
from slipstream.shared.distributed.error_meanings import ErrorMeaning, error_meaning
from slipstream.shared.errors import Interrupted
from slipstream.shared.models.factory import Predictor, zero_inputs

#: Number of timed passes for each of both sizes; the fastest counts.
PASSES = 5
#: Duration in seconds of a pass that is long enough to measure; larger sizes are not tried.
LONG_ENOUGH = 0.5


def overhead_seconds(
    model: Predictor, forward: Forward, clock: DeviceClock, rows: int, *, on_cpu: bool, has_batch_statistics: bool
) -> float:
    """Return the seconds of a forward and backward pass that do not depend on its rows.

    If t(r) is the time for r rows, they are 2·t(r/2) - t(r); r is at most ``rows``, the size of a micro-batch. A single
    row of tokens is halved in length. The result is 0 if it is within the noise of repeated passes, or if it cannot be
    measured: too little memory, a row that cannot be halved, or halves too small for batch statistics.

    Time is the device's; on a CPU it is this thread's CPU time, as other processes may run. The model is restored.
    """

    def seconds(batch: Sequence[Tensor]) -> float:
        model.zero_grad(set_to_none=True)
        began, cpu = clock.mark(), time.thread_time()
        with forward():
            outputs = model(*batch)
        outputs.sum().backward()
        used, ended = time.thread_time() - cpu, clock.mark()
        first = began.wait()
        return used if on_cpu else ended.wait() - first

    device = next(model.parameters()).device
    with unchanged_after(model):
        try:
            if rows > 1:
                least = ROWS if has_batch_statistics else 1
                halves = halvings(rows // 2, least)
                return of_sizes(lambda number: seconds(zero_inputs(model.signature, number, device)), halves)
            if model.signature.task == "next token" and not has_batch_statistics:
                (tokens,) = zero_inputs(model.signature, 1, device)
                halves = halvings(tokens.shape[1] // 2, 1)[-1:]
                return of_sizes(lambda length: seconds([tokens[:, :length]]), halves)
        except Interrupted:
            raise
        except Exception as error:
            # A model may require the full length. Lack of memory is handled when a training step runs out of it.
            if rows > 1 and error_meaning(error) is not ErrorMeaning.MEMORY:
                raise
    return 0.0


def halvings(largest: int, least: int) -> list[int]:
    """Return ``largest``, its half, its quarter and so on, not below ``least``, in ascending order."""
    sizes = []
    while largest >= least:
        sizes.append(largest)
        largest //= 2
    return sizes[::-1]


def of_sizes(seconds: Callable[[int], float], halves: Sequence[int]) -> float:
    """Return the overhead from passes of a size in ``halves`` and of twice that size; 0 if ``halves`` is empty.

    The size is the first for which a pass is long enough, else the largest. ``seconds`` times a pass of a given size.
    """
    if not halves:
        return 0.0
    seconds(halves[0])  # allocates memory and selects kernels
    for half in halves:
        if seconds(2 * half) >= LONG_ENOUGH:
            break
    timed = [(seconds(half), seconds(2 * half)) for _ in range(PASSES)]
    return beyond_noise([each for each, _ in timed], [each for _, each in timed])


def beyond_noise(halves: Sequence[float], wholes: Sequence[float]) -> float:
    """Return the overhead from repeated timings of half and whole passes; 0 if it is within their noise."""
    overhead = 2 * min(halves) - min(wholes)
    noise = 2 * (statistics.median(halves) - min(halves)) + statistics.median(wholes) - min(wholes)
    return overhead if overhead > noise else 0.0
