"""Checks, their context and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

import torch

State = Literal["held", "failed", "not run"]
CHECKS_PACKAGE = f"{__package__}.checks"


class CheckContext(NamedTuple):
    """Context of a check. Without a GPU, ``device`` is the CPU and ``devices`` is a number of processes.

    ``directory`` is temporary and empty; ``kept`` is the directory for files that the reader gets. ``small`` asks for
    small sizes.
    """

    device: torch.device
    devices: int
    directory: Path
    kept: Path
    small: bool


class CheckFigure(NamedTuple):
    """Measured figure: a number in ``unit``, or words."""

    name: str
    value: float | str
    unit: str = ""

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{self.name} {value} {self.unit}".rstrip()


class CannotRun(Exception):
    """Error of a check for which this machine lacks something."""


@dataclass(frozen=True)
class GpuCheck:
    """Check that raises if its ``claim`` does not hold, and is ended after ``limit_s``.

    ``function`` is "module:function", with a module of :mod:`slipstream.operations.proofs.gpu.checks` or a dotted name.
    """

    name: str
    claim: str
    function: str
    limit_s: float = 60.0

    def load(self) -> Callable[[CheckContext], Sequence[CheckFigure]]:
        module, _, function = self.function.partition(":")
        return getattr(import_module(module if "." in module else f"{CHECKS_PACKAGE}.{module}"), function)


@dataclass(frozen=True)
class CheckResult:
    """Result of a check, with the reason for a failure or a skip."""

    name: str
    claim: str
    state: State
    reason: str = ""
    seconds: float = 0.0
    figures: tuple[CheckFigure, ...] = field(default=())


#: All checks, in the order in which they run while there is time.
CHECKS = (
    GpuCheck("machine", "torch sees the GPU, by a driver that is new enough for it", "machine:versions"),
    GpuCheck("tests", "the tests marked `gpu` pass", "machine:marked_tests", 120),
    GpuCheck("speed", "a transformer in bf16 trains, with a trace", "steps:speed", 150),
    GpuCheck("no waits", "no step makes the host wait for the device", "steps:no_waits", 90),
    GpuCheck("kill and resume", "a killed training ends with the bits of an undisturbed one", "survival:resume", 120),
    GpuCheck("saves", "a snapshot is what a synchronous copy is, whatever the device computes", "saves:under_load", 90),
    GpuCheck("error", "an error of one rank is reported and ends the job", "survival:error", 60),
    GpuCheck("offload", "weights sharded by FSDP2 and kept on the host train like whole ones", "variants:offload"),
    GpuCheck("PowerSGD", "gradients as products of thin matrices train", "variants:powersgd"),
    GpuCheck("EMA", "averaged weights are the average of the steps' weights", "variants:averaged"),
    GpuCheck("non-finite", "a step with NaN is skipped and named, and costs nothing else", "variants:nonfinite"),
    GpuCheck("compile", "compiled blocks compute what eager ones do", "variants:compiled", 150),
    GpuCheck("graphs", "a captured pass of small models gives the eager one's gradients", "variants:graphs"),
    GpuCheck("loader", "rows reach the device as they are, and faster than by a DataLoader", "loading:loader", 90),
    GpuCheck("export", "ONNX Runtime on this device gives what torch gives", "exporting:parity"),
    GpuCheck("telemetry", "readings are the driver's, causes are named, and no step waits", "telemetry:telemetry", 120),
    GpuCheck("collectives", "the benchmark measures, like nccl-tests if installed", "exchange:collectives", 120),
    GpuCheck("layouts", "every layout computes what one process computes", "exchange:layouts", 180),
)
