"""Profiling of some steps: the time of every operation or kernel, and a trace."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, schedule

from slipstream.shared.artifacts.records import to_json
from slipstream.shared.artifacts.results.training import OPERATIONS, TRACE, Operation, Operations

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
