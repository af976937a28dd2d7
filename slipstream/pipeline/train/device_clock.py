"""Device of this process: its timestamps (CUDA events), and its selection in new threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch


class DeviceMark(Protocol):
    """Position in the device's queue of work."""

    def wait(self) -> float:
        """Wait until the device reaches this position; return the time, in seconds of ``time.perf_counter``."""


class PassedMark(NamedTuple):
    """Position that the device has passed, with the time ``at``."""

    at: float

    def wait(self) -> float:
        return self.at


class DeviceClock:
    """Clock of a device that works synchronously, like a CPU."""

    def mark(self) -> DeviceMark:
        """Mark the end of the work enqueued so far."""
        return PassedMark(time.perf_counter())


class CudaClock(DeviceClock):
    """Clock of a GPU's current stream.

    Wait for marks in about the order of their creation. Each time is measured from the last mark waited for, because
    CUDA events measure long intervals less exactly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._last, self._at = self._event(), time.perf_counter()

    def mark(self) -> DeviceMark:
        return CudaMark(self, self._event())

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def time_of(self, event: torch.cuda.Event) -> float:
        event.synchronize()
        at = self._at + 1e-3 * self._last.elapsed_time(event)
        if at > self._at:
            self._last, self._at = event, at
        return at


@dataclass(frozen=True)
class CudaMark:
    clock: CudaClock
    event: torch.cuda.Event

    def wait(self) -> float:
        return self.clock.time_of(self.event)


def wait_for(stream: torch.cuda.Stream) -> None:
    """Wait until the GPU has finished the work enqueued on the stream so far.

    The thread sleeps. Waiting for a stream, or for an event that is not ``blocking``, would keep a core busy.
    """
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()


def device_clock(device: torch.device) -> DeviceClock:
    return CudaClock(device) if device.type == "cuda" else DeviceClock()


def same_gpu() -> Callable[[], None]:
    """Return a function that selects this thread's GPU in a new thread, which must call it first.

    The current device of a new thread is GPU 0, whichever GPU its process uses. Creating a stream on GPU 0 would create
    a CUDA context there: half a GiB for every rank of the machine. Does nothing if this process uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
