"""Timestamps between the phases of a step, without waiting for the device.

A callback at the end of the backward graph marks the last gradient. It is queued when the backward pass starts, so it
precedes DDP's callback, which waits for the exchange of gradients. After the mark the pass only waits.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from torch import Tensor
from torch.autograd import Variable

from slipstream.pipeline.train.checkpoint.background import StepWait
from slipstream.pipeline.train.device_clock import DeviceClock, DeviceMark
from slipstream.pipeline.train.telemetry.step_times import StepPhases


class StepMarks:
    """Timestamps of one step.

    ``ready`` is when the host had the batch, ``begin`` when the device starts the step.
    """

    def __init__(self, clock: DeviceClock, paused: float) -> None:
        """Start a step; ``paused`` is the total of pauses between steps so far, in seconds."""
        self._clock = clock
        self.paused = paused
        self.ready = time.perf_counter()
        self.begin = clock.mark()
        self.gradient: DeviceMark | None = None
        self.exchanged: DeviceMark | None = None
        #: CPU seconds of this thread from the batch to the last gradient.
        self.compute_cpu = 0.0
        self._cpu = time.thread_time()

    def backward_of(self, loss: Tensor) -> None:
        """Mark the end of this loss's backward pass; with several losses the last mark counts."""
        if loss.requires_grad:
            loss.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._has_gradient)

    def _has_gradient(self) -> None:
        self.gradient = self._clock.mark()
        self.compute_cpu = time.thread_time() - self._cpu

    def has_exchanged(self) -> None:
        """Mark that all backward passes of the step have returned."""
        self.exchanged = self._clock.mark()


class StepTimestamps(NamedTuple):
    """Device-side timestamps of a step, on the clock of ``time.perf_counter``."""

    begin: float
    gradient: float
    exchanged: float
    end: float


class StepTiming(NamedTuple):
    """Timing of an enqueued step, which the device may not have started."""

    start: StepMarks
    end: DeviceMark
    #: Seconds that the host waited for the batch.
    waited: float
    #: Wait of the optimiser step for a snapshot; None if it did not wait.
    snapshot_wait: StepWait | None
    #: Total seconds of pauses between steps so far.
    paused: float
    #: Total seconds so far for which this thread waited for a core.
    processor_wait: float

    def data_wait(self, begin: float, idle_since: float) -> float:
        """Return the seconds that the idle device waited for this step's batch.

        The device was idle from ``idle_since``, and started the step at ``begin``.
        """
        idle_from = max(idle_since, self.start.ready - self.waited)
        return max(0.0, min(begin, self.start.ready) - idle_from)

    def wait(self) -> StepTimestamps:
        """Wait until the device has finished the step, and return its timestamps."""
        begin = self.start.begin.wait()
        gradient = self.start.gradient.wait() if self.start.gradient else None
        exchanged = self.start.exchanged.wait() if self.start.exchanged else begin
        # Without a loss on this process, computing and waiting are indistinguishable.
        return StepTimestamps(begin, exchanged if gradient is None else gradient, exchanged, self.end.wait())

    def phases(
        self, at: StepTimestamps, previous: StepTiming, idle: float, data_wait: float, stall: float
    ) -> StepPhases:
        """Return the durations of this step's phases, in seconds.

        ``idle`` is the device's idle time since the previous step, including ``data_wait`` for lack of a batch.
        ``stall`` is the optimiser step's wait for a save.
        """
        return StepPhases(
            data=data_wait,
            # GPU timings of microseconds are inexact.
            compute=max(0.0, at.gradient - at.begin),
            exchange=max(0.0, at.exchanged - at.gradient),
            optimizer=max(0.0, at.end - at.exchanged - stall),
            rest=max(0.0, idle - data_wait - (self.start.paused - previous.paused)),
            processor_wait=self.processor_wait - previous.processor_wait,
            compute_cpu=self.start.compute_cpu,
        )


class ProcessorWait:
    """Time that this thread was runnable without a free core.

    Linux counts it in ``/proc/thread-self/schedstat``, second field, in ns.
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def seconds(self) -> float:
        """Return the seconds waited since this thread started; 0 if the kernel does not count them."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
