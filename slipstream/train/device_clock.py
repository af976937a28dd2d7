"""When the device comes to a place in its work, which may be long after the host has given it that work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class Mark(Protocol):
    """A place in the device's work."""

    def wait(self) -> float:
        """Wait until the device has come here; return when it did, on the clock of ``time.perf_counter``."""


class Past(NamedTuple):
    """A place that the device has passed."""

    at: float

    def wait(self) -> float:
        return self.at


class DeviceClock:
    """The clock of a device that has done its work as soon as it is given it, like a CPU."""

    def mark(self) -> Mark:
        """Mark the end of the work that the device has been given by now."""
        return Past(time.perf_counter())


class CudaClock(DeviceClock):
    """The clock of a GPU's current stream. Marks have to be waited for in about the order in which they were made, as
    the time of each is measured from the last one waited for: GPUs measure long times less exactly."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._last, self._at = self._event(), time.perf_counter()

    def mark(self) -> Mark:
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
    """Wait until the GPU has done the work that the stream has been given by now. The thread sleeps meanwhile: in the
    waits of streams, and of events that are not ``blocking``, it keeps a processor busy."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()


def clock_of(device: torch.device) -> DeviceClock:
    return CudaClock(device) if device.type == "cuda" else DeviceClock()
