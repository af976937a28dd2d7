"""Device of this process: its timestamps (CUDA events), and its selection in new threads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, schedule

from slipstream.shared.artifacts.records import to_json
from slipstream.shared.artifacts.results.training import OPERATIONS, TRACE, Operation, Operations


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


#: Steps without profiling, and with profiling but discarded: first steps, and first profiled steps, are slower.
WAIT, WARM_UP = 4, 1
#: Maximum number of operations in the result.
LISTED = 40
#: Prefix of the event that the profiler adds for every step.
MARK = "ProfilerStep"


class StepProfiler:
    """Profiler of ``steps`` steps, from the sixth of this attempt on."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._steps = steps
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1),
            on_trace_ready=self._take,
        )
        #: Files of the profile, by name; empty until it is complete.
        self.files: dict[str, bytes] = {}

    def __enter__(self) -> None:
        self._profile.start()

    def __exit__(self, *_: object) -> None:
        self._profile.stop()

    def step(self) -> None:
        """Record that a step was enqueued."""
        self._profile.step()

    def _take(self, finished: profile) -> None:
        # If the attempt ends before all steps are recorded, times per step would be wrong.
        if finished.step_num < WAIT + WARM_UP + self._steps:
            return
        with tempfile.TemporaryDirectory() as scratch:
            found = summarise_operations(finished.key_averages(), self._steps, self._on_gpu)
            path = Path(scratch) / TRACE
            finished.export_chrome_trace(str(path))
            self.files = {TRACE: path.read_bytes(), OPERATIONS: to_json(found)}


def summarise_operations(events: Iterable[FunctionEventAvg], steps: int, on_gpu: bool) -> Operations:
    """Return the time that ``steps`` steps spent per operation (CPU) or kernel (GPU)."""
    # The profiler counts a kernel's time three times: for the kernel, for the operation that launched it, and for
    # enclosing annotations. Like torch's own total (``torch.autograd.profiler_util._build_table``), only kernels count.
    found = [
        Operation(name=str(event.key), calls=event.count, seconds=1e-6 * microseconds)
        for event in events
        if (is_of_device(event) if on_gpu else is_of_host(event))
        and (microseconds := event.self_device_time_total if on_gpu else event.self_cpu_time_total) > 0
    ]
    found.sort(key=lambda operation: operation.seconds, reverse=True)
    total = sum(operation.seconds for operation in found)
    return Operations(steps=steps, seconds=total, operations=found[:LISTED])


def is_of_device(event: FunctionEventAvg) -> bool:
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def is_of_host(event: FunctionEventAvg) -> bool:
    return event.device_type == DeviceType.CPU and not str(event.key).startswith(MARK)
