"""The places of a step between which its phases lie, marked without a wait for the device.

The last gradient is marked by a callback at the end of the backward pass' graph. It is queued when the pass begins,
and so runs before DDP's own, which waits for the exchange: after it the pass only waits.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from torch import Tensor
from torch.autograd import Variable

from slipstream.train.checkpoint.background import StepWait
from slipstream.train.device_clock import DeviceClock, Mark
from slipstream.train.telemetry.step_times import StepTime


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


class Places(NamedTuple):
    """When the device came to the places of a step, on the clock of ``time.perf_counter``."""

    begin: float
    gradient: float
    exchanged: float
    end: float


class StepTiming(NamedTuple):
    """The times of a step, which the device may not have begun yet."""

    start: StepMarks
    end: Mark
    #: Seconds for which the host had waited for its batch.
    waited: float
    snapshot_wait: StepWait | None
    #: Seconds of all pauses between steps until now, and for which this thread waited for a processor.
    paused: float
    processor_wait: float

    def data_wait(self, begin: float, idle_since: float) -> float:
        """Seconds for which the device, idle since then, had to wait for the batch of this step, which it began at
        ``begin``."""
        idle_from = max(idle_since, self.start.ready - self.waited)
        return max(0.0, min(begin, self.start.ready) - idle_from)

    def wait(self) -> Places:
        """Wait until the device has finished the step."""
        begin = self.start.begin.wait()
        gradient = self.start.gradient.wait() if self.start.gradient else None
        exchanged = self.start.exchanged.wait() if self.start.exchanged else begin
        # Where the loss is another process's, nothing tells computing from waiting.
        return Places(begin, exchanged if gradient is None else gradient, exchanged, self.end.wait())

    def phases(self, at: Places, previous: StepTiming, idle: float, data_wait: float, stall: float) -> StepTime:
        """The phases of this step. The device was ``idle`` since the previous one for so many seconds, ``data_wait`` of
        them for want of a batch; for ``stall`` seconds a save stopped the step."""
        return StepTime(
            data=data_wait,
            # GPUs measure times of microseconds inexactly.
            compute=max(0.0, at.gradient - at.begin),
            exchange=max(0.0, at.exchanged - at.gradient),
            optimizer=max(0.0, at.end - at.exchanged - stall),
            rest=max(0.0, idle - data_wait - (self.start.paused - previous.paused)),
            processor_wait=self.processor_wait - previous.processor_wait,
            compute_cpu=self.start.compute_cpu,
        )


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
