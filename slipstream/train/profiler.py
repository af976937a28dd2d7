"""A profile of some steps: which operations or kernels take the time, and a trace of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, schedule

from slipstream.artifacts.records import to_json
from slipstream.artifacts.results.training import OPERATIONS, TRACE, Operation, Operations

#: Steps before those that are recorded: the first ones are slower, and so is the first that is recorded.
WAIT, WARM_UP = 4, 1
#: Operations that are listed.
LISTED = 40
#: The profiler's own mark of a step.
MARK = "ProfilerStep"


class StepProfiler:
    """Records the operations of ``steps`` steps, from the sixth of this attempt on."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._steps = steps
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=steps, repeat=1),
            on_trace_ready=self._take,
        )
        #: The files of the profile by name, once it is complete.
        self.files: dict[str, bytes] = {}

    def __enter__(self) -> None:
        self._profile.start()

    def __exit__(self, *_: object) -> None:
        self._profile.stop()

    def step(self) -> None:
        """A step was given to the device."""
        self._profile.step()

    def _take(self, finished: profile) -> None:
        # With fewer steps there is no figure of a step; an attempt may end before.
        if finished.step_num < WAIT + WARM_UP + self._steps:
            return
        with tempfile.TemporaryDirectory() as scratch:
            found = operations(finished.key_averages(), self._steps, self._on_gpu)
            path = Path(scratch) / TRACE
            finished.export_chrome_trace(str(path))
            self.files = {TRACE: path.read_bytes(), OPERATIONS: to_json(found)}


def operations(events: Iterable[FunctionEventAvg], steps: int, on_gpu: bool) -> Operations:
    """What ``steps`` steps spent their time on: on a CPU operations, on a GPU kernels.

    The profiler gives a kernel's time three times: to the kernel, to the operation that launched it, and to the
    annotations around that. Its own total is of what the device ran (``torch.autograd.profiler_util._build_table``),
    and so is this.
    """
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
