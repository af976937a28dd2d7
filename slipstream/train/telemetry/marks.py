"""The places of a step between which its phases lie, marked without a wait for the device.

The last gradient is marked by a callback at the end of the backward pass' graph. It is queued when the pass begins,
and so runs before DDP's own, which waits for the exchange: after it the pass only waits.
"""

from __future__ import annotations

import os
import time

from torch import Tensor
from torch.autograd import Variable

from slipstream.train.device_clock import DeviceClock, Mark


class StepMarks:
    """The places of one step. ``ready`` is when the host had its batch, ``begin`` where the device begins with it."""

    def __init__(self, clock: DeviceClock, paused: float) -> None:
        """``paused`` are the seconds of all pauses between steps until now."""
        self._clock = clock
        self.paused = paused
        self.ready = time.perf_counter()
        self.begin = clock.mark()
        self.gradient: Mark | None = None
        self.exchanged: Mark | None = None
        #: Seconds of processor time that this thread took from the batch to the last gradient.
        self.compute_cpu = 0.0
        self._cpu = time.thread_time()

    def backward_of(self, loss: Tensor) -> None:
        """The backward pass of this loss is about to begin; of several the last counts."""
        if loss.requires_grad:
            loss.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._has_gradient)

    def _has_gradient(self) -> None:
        self.gradient = self._clock.mark()
        self.compute_cpu = time.thread_time() - self._cpu

    def has_exchanged(self) -> None:
        """All backward passes of the step have returned."""
        self.exchanged = self._clock.mark()


class ProcessorWait:
    """For how long this thread was ready to run, and no processor was free: Linux counts it (``/proc``'s schedstat,
    second field, in ns)."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def seconds(self) -> float:
        """Since this thread began; 0 where the kernel does not count it."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
