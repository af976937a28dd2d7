"""Device of this process: its timestamps (CUDA events), and its selection in new threads."""

from __future__ import annotations

import gzip
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from slipstream.shared.artifacts.records import to_json
from slipstream.shared.artifacts.results.training import OPERATIONS, TRACE, Operation, Operations, Throughput
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.logs import logger
from slipstream.shared.machine.gpus import data_sheet_peak

LOG = logger("train")


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

    Wait for marks in about the order of their creation. Times are measured from the last mark waited for: CUDA events
    measure long intervals less exactly.
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

    The current device of a new thread is GPU 0. Creating a stream there would create a CUDA context of half a GiB for
    every rank of the machine. Does nothing if this process uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


#: Steps without profiling: the first ones are slower.
WAIT = 2
#: Index of the step whose trace is measured, between two that are profiled and discarded, as they are slower.
MEASURED = WAIT + 1
#: Steps before the first recorded one.
BEFORE = MEASURED + 2
#: Bytes of all recorded steps in the uncompressed trace.
MOST_BYTES = 100_000_000
#: Maximum number of operations in the result.
LISTED = 40
#: Prefix of the event that the profiler adds for every step.
MARK = "ProfilerStep"


class StepProfiler:
    """Profiler of ``steps`` steps, from the sixth of this attempt on.

    It records fewer if their trace would exceed ``most_bytes``, by the trace of one step.
    """

    def __init__(self, steps: int, device: torch.device, most_bytes: int = MOST_BYTES) -> None:
        self._asked = self._steps = steps
        self._most_bytes = most_bytes
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities, schedule=self._action, on_trace_ready=self._take)
        #: Files of the profile, by name; empty until it is complete.
        self.files: dict[str, bytes] = {}

    def __enter__(self) -> None:
        self._profile.start()

    def __exit__(self, *_: object) -> None:
        self._profile.stop()

    def step(self) -> None:
        """Record that a step was enqueued."""
        self._profile.step()

    def _action(self, step: int) -> ProfilerAction:
        last = BEFORE + self._steps - 1
        if step < WAIT or step > last:
            return ProfilerAction.NONE
        if step in (MEASURED, last):
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.WARMUP if step < BEFORE else ProfilerAction.RECORD

    def _take(self, finished: profile) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / TRACE.removesuffix(".gz")
            if finished.step_num <= BEFORE:
                finished.export_chrome_trace(str(path))
                self._limit(path.stat().st_size)
            # If the attempt ends before all steps are recorded, times per step would be wrong.
            elif finished.step_num >= BEFORE + self._steps:
                found = summarise_operations(finished.key_averages(), self._steps, self._on_gpu)
                finished.export_chrome_trace(str(path))
                self.files = {TRACE: gzip.compress(path.read_bytes()), OPERATIONS: to_json(found)}

    def _limit(self, step_bytes: int) -> None:
        self._steps = min(self._asked, max(1, self._most_bytes // step_bytes))
        if self._steps < self._asked:
            LOG.warning(
                "training.profile.steps: %s of %s steps are profiled, since the trace of one has %s bytes, and %s are "
                "the limit",
                *(f"{number:,}" for number in (self._steps, self._asked, step_bytes, self._most_bytes)),
            )


def summarise_operations(events: Iterable[FunctionEventAvg], steps: int, on_gpu: bool) -> Operations:
    """Return the time that ``steps`` steps spent per operation (CPU) or kernel (GPU).

    Gloo's collectives overlap with other operations.
    """
    # The profiler counts a kernel's time three times: for the kernel, for the operation that launched it, and for
    # enclosing annotations. Like torch's own total (``torch.autograd.profiler_util._build_table``), only kernels count.
    found = [
        Operation(name=str(event.key), calls=event.count, seconds=1e-6 * microseconds)
        for event in events
        if (is_of_device(event) if on_gpu else is_of_host(event))
        and (microseconds := event.self_device_time_total if on_gpu else host_microseconds(event)) > 0
    ]
    found.sort(key=lambda operation: operation.seconds, reverse=True)
    total = sum(operation.seconds for operation in found)
    return Operations(steps=steps, seconds=total, operations=found[:LISTED])


def is_of_device(event: FunctionEventAvg) -> bool:
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


def is_of_host(event: FunctionEventAvg) -> bool:
    return event.device_type == DeviceType.CPU and not str(event.key).startswith(MARK)


def host_microseconds(event: FunctionEventAvg) -> float:
    """Return the event's time without that of events inside it.

    An event that ends in another thread, such as a collective of gloo, has its whole time: torch counts none of its
    own.
    """
    return event.cpu_time_total if event.is_async else event.self_cpu_time_total


# MFU (Chowdhery et al. 2022, PaLM, appendix B) is the number of FLOPs that the model's forward and backward passes
# need, divided by what the devices could compute in that time. Recomputation and the optimiser do not count.
#: Width of the square matrices in timed matmuls (on a CPU, on a GPU), and number of matmuls.
WIDTH, GPU_WIDTH, PRODUCTS = 512, 4096, 8
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_throughput(
    *, rows: int, seconds: float, tokens_per_row: int, flops_per_row: float, kind: str, group: RankContext
) -> Throughput | None:
    """Return the throughput of ``rows`` that all ranks trained on in ``seconds``; None without rows.

    ``kind`` is the type of computation: "fp32", "tf32", "bf16" or "fp16". All ranks must call this.
    """
    if not rows or seconds <= 0:
        return None
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "cpu"
    known = data_sheet_peak(name, kind)
    memory = largest_memory(group.device)  # before the matmuls, which need memory themselves
    mine = [known or measured_peak(group.device, kind), memory]
    figures = torch.tensor(mine, dtype=torch.float64, device=group.device)
    gathered = [torch.empty_like(figures) for _ in range(group.world)]
    dist.all_gather(gathered, figures)
    peaks, memories = torch.stack(gathered).cpu().unbind(dim=1)
    per_second = rows / seconds
    return Throughput(
        rows_per_s=per_second,
        flops_per_row=flops_per_row,
        peak_flops=peaks.sum().item(),
        peak_from=f"the data sheet of {name}" if known else "measured",
        utilisation=per_second * flops_per_row / peaks.sum().item(),
        memory_bytes=int(memories.max().item()),
        tokens_per_s=per_second * tokens_per_row if tokens_per_row else None,
    )


def measured_peak(device: torch.device, kind: str) -> float:
    """Return the FLOP/s of the fastest of several large matmuls."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory left by training is enough
    width = GPU_WIDTH if device.type == "cuda" else WIDTH
    one: Tensor = torch.ones(width, width, dtype=DTYPES[kind], device=device)
    best = float("inf")
    for _ in range(PRODUCTS):
        synchronise_device(device)
        started = time.perf_counter()
        one @ one
        synchronise_device(device)
        best = min(best, time.perf_counter() - started)
    return 2 * width**3 / best


def largest_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: of tensors on a GPU, else its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ``ru_maxrss`` is in KiB, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def synchronise_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
