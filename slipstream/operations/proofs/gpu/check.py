"""Checks, their context and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

import torch

State = Literal["held", "failed", "not run"]
#: File in the output to which every figure is appended when it is measured.
FIGURES = "figures.jsonl"
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


class Limit(NamedTuple):
    """Range of a figure within which a claim holds; on a CPU, which only rehearses, if it holds ``anywhere``."""

    figure: str
    least: float = -math.inf
    most: float = math.inf
    anywhere: bool = False

    def describe_breach(self, figures: Sequence[CheckFigure]) -> str:
        """Return how the limit is broken, "" if it is kept; a figure that was not measured breaks it."""
        values = [each.value for each in figures if each.name == self.figure]
        if not values:
            return f"{self.figure} was not measured"
        value = values[-1]
        if isinstance(value, str) or self.least <= value <= self.most:
            return ""
        expected = f"at least {self.least:g}" if value < self.least else f"at most {self.most:g}"
        return f"{self.figure} is {value:.4g}; expected {expected}"


class CannotRun(Exception):
    """Error of a check for which this machine lacks something."""


@dataclass(frozen=True)
class GpuCheck:
    """Check of a ``claim``, which fails if it raises or a figure breaks a limit, and is ended after ``limit_s``.

    ``function`` is "module:function", with a module of :mod:`slipstream.operations.proofs.gpu.checks` or a dotted name.
    """

    name: str
    claim: str
    function: str
    limit_s: float = 60.0
    limits: tuple[Limit, ...] = ()

    def describe_breach(self, figures: Sequence[CheckFigure], *, rehearsed: bool) -> str:
        """Return which limits the figures break; "" if none."""
        found = [each.describe_breach(figures) for each in self.limits if each.anywhere or not rehearsed]
        return ", ".join(filter(None, found))

    def load(self) -> Callable[[CheckContext], Iterable[CheckFigure]]:
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


def exactly(figure: str, value: float = 0.0) -> Limit:
    return Limit(figure, value, value, anywhere=True)


def at_most(figure: str, value: float) -> Limit:
    """Return a limit that a rehearsal keeps, too, because it is of numbers and not of times."""
    return Limit(figure, most=value, anywhere=True)


def same_memory(way: str) -> Limit:
    return Limit(f"{way}: plan over measured", 95.0, 105.0)


#: All checks by their worth, in which order they run while there is time.
CHECKS = (
    GpuCheck(
        "machine",
        "torch sees the GPU, by a driver that is new enough for it",
        "machine:versions",
        30,
        (exactly("names that torch lacks"),),
    ),
    GpuCheck(
        "kernels",
        "attention by documents and the loss are exact to rounding, repeatable and near their bandwidth",
        "kernels:kernels",
        60,
        (
            at_most("attention by documents: error", 0.03),
            exactly("attention by documents: tensors that differ when repeated"),
            Limit("attention by documents, of causal", most=120.0),
            at_most("loss: error", 1e-3),
            at_most("gradient of the loss: error", 4e-3),
            exactly("loss: passes that differ when repeated"),
            Limit("loss, over the time of its least bytes", most=2.0),
        ),
    ),
    GpuCheck(
        "speed",
        "125 M parameters train in bf16 as fast as by a plain compiled loop",
        "steps:speed",
        110,
        (Limit("share of peak", least=20.0), Limit("of the plain loop", least=97.0)),
    ),
    GpuCheck(
        "kill and resume",
        "a killed training ends with the bits of an undisturbed one",
        "survival:resume",
        90,
        (exactly("files that differ"),),
    ),
    GpuCheck(
        "no waits",
        "no step makes the host wait for the device",
        "steps:no_waits",
        60,
        tuple(exactly(name, 8.0) for name in ("bf16", "fp32, EMA", "FSDP2")),
    ),
    GpuCheck(
        "compile",
        "compiled blocks compute what eager ones do, and faster",
        "variants:compiled",
        80,
        (at_most("losses differ by", 1e-3), Limit("a pass against eager", least=1.0)),
    ),
    GpuCheck(
        "profile",
        "the longest operations of a step are known",
        "steps:profile",
        60,
        (Limit("calls of a step's longest operations", most=2000.0),),
    ),
    GpuCheck(
        "documents",
        "to keep documents apart costs at most a tenth",
        "steps:documents",
        80,
        (Limit("speed, of across documents", least=90.0),),
    ),
    GpuCheck("tests", "the tests marked `gpu` pass", "machine:marked_tests", 60, (Limit("passed", least=1.0),)),
    GpuCheck(
        "memory",
        "the plan is within 5 % of the memory that is allocated",
        "steps:memory",
        110,
        tuple(map(same_memory, ("defaults", "recompute", "accumulation", "FSDP2", "EMA"))),
    ),
    GpuCheck(
        "saves",
        "a save per ten steps stalls training for at most 1 % of its time",
        "saves:of_training",
        60,
        (Limit("stall, of the steps", most=1.0),),
    ),
    GpuCheck(
        "QLoRA",
        "a base in four bits costs at most half of a step's time",
        "steps:qlora",
        60,
        (Limit("NF4, of bf16", most=150.0),),
    ),
    GpuCheck(
        "deterministic",
        "deterministic kernels cost at most a third",
        "steps:deterministic",
        80,
        (Limit("cost of determinism", most=33.0),),
    ),
    GpuCheck(
        "non-finite",
        "a step with NaN is skipped and named, and costs nothing else",
        "variants:nonfinite",
        40,
        (exactly("skipped step", 5.0),),
    ),
    GpuCheck(
        "offload",
        "weights sharded by FSDP2 and kept on the host train like whole ones",
        "variants:offload",
        40,
        (at_most("losses differ by", 1e-3),),
    ),
    GpuCheck(
        "PowerSGD",
        "gradients as products of thin matrices train",
        "variants:powersgd",
        40,
        (at_most("last loss, of the first", 99.0),),
    ),
    GpuCheck(
        "error",
        "an error of one rank is reported and ends the job",
        "survival:error",
        60,
        (at_most("until it was said", 5.0),),
    ),
    GpuCheck(
        "loader",
        "every row reaches the device once an epoch, as fast as from a DataLoader of whole batches",
        "loading:loader",
        60,
        (exactly("rows that came more or less than once"), Limit("over DataLoader", least=1.0)),
    ),
    GpuCheck(
        "telemetry",
        "readings are the driver's, causes are named, and no step waits",
        "telemetry:telemetry",
        90,
        (Limit("without a wait", least=1.0, anywhere=True),),
    ),
    GpuCheck(
        "1.1B",
        "1.1 billion parameters train as fast as by a plain compiled loop",
        "steps:large",
        150,
        (Limit("share of peak", least=20.0), Limit("of the plain loop", least=97.0)),
    ),
    GpuCheck(
        "snapshots",
        "a snapshot is what a synchronous copy is, whatever the device computes",
        "saves:under_load",
        60,
        (exactly("snapshots that differ"), Limit("stall, of a copy to a pinned buffer", most=100.0)),
    ),
    GpuCheck(
        "EMA",
        "averaged weights are the average of the steps' weights",
        "variants:averaged",
        40,
        (at_most("averages differ by", 1e-5),),
    ),
    GpuCheck(
        "graphs",
        "a captured pass of small models gives the eager one's gradients, and is faster",
        "variants:graphs",
        40,
        (Limit("a captured pass of the MLP", least=1.0),),
    ),
    GpuCheck(
        "export",
        "ONNX Runtime on this device gives what torch gives",
        "exporting:parity",
        40,
        (at_most("outputs differ by", 1e-3),),
    ),
    GpuCheck(
        "collectives",
        "the benchmark measures, like nccl-tests if installed",
        "exchange:collectives",
        60,
        (Limit("processes", least=1.0, anywhere=True),),
    ),
    GpuCheck(
        "layouts",
        "every layout computes what one process computes",
        "exchange:layouts",
        180,
        (at_most("weights: apart by", 1e-9),),
    ),
)
