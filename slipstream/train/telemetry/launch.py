"""Fixed cost of a pass, independent of its rows: kernel launches."""

from __future__ import annotations

import time

from slipstream.models.factory import Predictor, zeros
from slipstream.train.device_clock import DeviceClock
from slipstream.train.loop.probe import ROWS, unchanged_after
from slipstream.train.parallel.model import Forward

#: Timed passes; the fastest counts. A first one is not timed, since it allocates memory and selects kernels.
PASSES = 3


def two_row_seconds(model: Predictor, forward: Forward, clock: DeviceClock, *, on_cpu: bool) -> float:
    """Return the seconds of a forward and backward pass over two rows.

    It is device time; on a CPU this thread's CPU time, as other processes may run meanwhile. The model is restored.
    """
    rows = zeros(model.signature, ROWS, next(model.parameters()).device)

    def seconds() -> float:
        began, cpu = clock.mark(), time.thread_time()
        with forward():
            outputs = model(*rows)
        outputs.float().sum().backward()
        used, ended = time.thread_time() - cpu, clock.mark()
        first = began.wait()
        return used if on_cpu else ended.wait() - first

    with unchanged_after(model):
        seconds()
        return min(seconds() for _ in range(PASSES))
