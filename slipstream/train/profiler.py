"""A profile of some steps: which operations take the time, and a trace of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
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
            path = Path(scratch) / TRACE
            finished.export_chrome_trace(str(path))
            self.files = {TRACE: path.read_bytes(), OPERATIONS: to_json(self._operations(finished))}

    def _operations(self, finished: profile) -> Operations:
        found = [
            Operation(name=event.key, calls=event.count, seconds=1e-6 * microseconds)
            for event in finished.key_averages()
            if not event.key.startswith(MARK)
            and (microseconds := event.self_device_time_total if self._on_gpu else event.self_cpu_time_total) > 0
        ]
        found.sort(key=lambda operation: operation.seconds, reverse=True)
        total = sum(operation.seconds for operation in found)
        return Operations(steps=self._steps, seconds=total, operations=found[:LISTED])
