"""The record of a training run inside the artifact of a trained model: ``history.json`` and ``attempt.json``.

The weights in the same artifact are read by :mod:`slipstream.models.trained`, which needs torch; this module does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.records import read_record, to_json
from slipstream.artifacts.results.bottleneck import Bottleneck
from slipstream.artifacts.results.devices import DEVICES, TrainingDevices

KIND = "train"
HISTORY = "history.json"
ATTEMPT = "attempt.json"
#: A profile of some steps, if it was asked for: :class:`Operations`, and Chrome's trace of them.
OPERATIONS, TRACE = "operations.json", "trace.json.gz"


@dataclass(frozen=True)
class LossPoint:
    """The mean training loss since the point before, and the learning rate of the last step."""

    step: int
    epoch: float
    loss: float
    learning_rate: float


@dataclass(frozen=True)
class ValidationPoint:
    """One evaluation on the validation split: its loss, and accuracy (classification) or RMSE (regression)."""

    step: int
    epoch: float
    loss: float
    accuracy: float | None = None
    rmse: float | None = None
    #: The training loss at the last point before.
    train_loss: float | None = None


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was skipped, as its loss or its gradient was non-finite."""

    step: int
    #: Rows of the training split, counted through its files, that give such a loss or gradient by themselves; at most
    #: eight of each process, and none where it takes several rows.
    rows: list[int]
    #: All rows of the step's batch.
    batch: list[int]


@dataclass(frozen=True)
class LeftOut:
    """Training rolled back to the checkpoint of step ``after`` and continued with step ``through`` + 1."""

    after: int
    through: int


@dataclass(frozen=True)
class ProcessGroupFigures:
    """The process group that finished the run."""

    size: int
    backend: str
    device: str
    precision: str
    threads: int


@dataclass(frozen=True)
class History:
    """The contents of ``history.json``. It holds no times, so that equal runs have equal histories."""

    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint
    steps_total: int
    stopped_early: bool
    parameters: int
    world: ProcessGroupFigures
    skipped: list[SkippedStep] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    #: Of the parameters those that were trained; None of an older training: all.
    trained: int | None = None


@dataclass(frozen=True)
class Goodput:
    """All attempts of a run together."""

    attempts: int
    #: Optimiser steps that were executed, and those of them that no later attempt repeated.
    executed: int
    kept: int
    #: Seconds by activity, see :mod:`slipstream.train.fault_tolerance.goodput`.
    seconds: dict[str, float]
    #: Seconds of repeated steps.
    lost: float
    #: Wall-clock seconds of all attempts.
    wall: float
    #: How each attempt ended, in order.
    ends: tuple[str, ...]
    #: ``kept / executed``; 1 before the first step.
    useful_steps: float
    #: Time of steps that were kept over ``wall``; 1 before the first step.
    goodput: float
    #: Checkpoints that were published; None in records of versions that did not count them.
    saves: int | None = None

    def __str__(self) -> str:
        lost = self.executed - self.kept
        return (
            f"{self.kept} steps kept of {self.executed} executed ({self.useful_steps:.1%}) in {self.attempts} "
            f"attempt{'s' if self.attempts > 1 else ''}, {lost} lost; goodput {self.goodput:.1%} of {self.wall:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How fast the attempt trained, without evaluations, over all processes."""

    rows_per_s: float
    #: Of rows of tokens.
    tokens_per_s: float | None = None
    #: Floating-point operations of forward and backward pass; torch counts those of products and convolutions.
    flops_per_row: float
    #: What all devices together can do at most in a second, and where that is from.
    peak_flops: float
    peak_from: str
    #: Model FLOPs utilisation: ``rows_per_s * flops_per_row / peak_flops``.
    utilisation: float
    #: The most that a process had at once, on its GPU, or on a CPU in all.
    memory_bytes: int


@dataclass(frozen=True)
class CompiledPass:
    """What ``torch.compile`` took, and a pass over a micro-batch with it and without, forward and backward: seconds."""

    seconds: float
    pass_s: float
    plain_pass_s: float


@dataclass(frozen=True)
class Operation:
    """An operation of torch, without those in it, or on a GPU a kernel: how often it ran in the steps, its seconds."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Operations:
    """The contents of ``operations.json``: of ``steps`` steps of rank 0 the operations that took longest, on its GPU or
    CPU. ``seconds`` are those of all operations."""

    steps: int
    seconds: float
    operations: list[Operation]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The contents of ``attempt.json``: the attempt that finished the run, and the goodput over all attempts."""

    #: Steps that the last attempt executed.
    steps: int
    #: The URI of the checkpoint that it resumed from; empty if there was none.
    resumed_from: str
    #: From snapshot to publication of the last checkpoint that it saved; 0 if it saved none.
    save_seconds: float = 0.0
    ledger: Goodput
    #: Absent if the attempt executed no step.
    throughput: Throughput | None = None
    #: Absent if nothing was compiled.
    compiled: CompiledPass | None = None
    #: Absent if no step was finished, and in records from before there was one.
    bottleneck: Bottleneck | None = None
    #: The code versions of the stage that trained, in order; empty in records of older releases.
    code_versions: list[str] = field(default_factory=list)


def record_files(history: History, attempt: Attempt, devices: TrainingDevices | None = None) -> dict[str, bytes]:
    """The files about a training, by name."""
    files = {HISTORY: to_json(history), ATTEMPT: to_json(attempt)}
    return files | ({DEVICES: to_json(devices)} if devices else {})


def read_history(directory: Path) -> History:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole trained model."""
    return read_record(Artifact.open(directory, KIND), HISTORY, History)


def read_operations(directory: Path) -> Operations | None:
    """None if no steps were profiled. Raises ``DamagedArtifact`` as the others."""
    artifact = Artifact.open(directory, KIND)
    return read_record(artifact, OPERATIONS, Operations) if OPERATIONS in artifact.files else None


def read_devices(directory: Path) -> TrainingDevices | None:
    """None if nothing was sampled. Raises ``DamagedArtifact`` as the others."""
    artifact = Artifact.open(directory, KIND)
    return read_record(artifact, DEVICES, TrainingDevices) if DEVICES in artifact.files else None


def read_attempt(directory: Path) -> Attempt:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole trained model."""
    return read_record(Artifact.open(directory, KIND), ATTEMPT, Attempt)


def code_versions_of(trained: Artifact) -> list[str]:
    """Return the code versions that trained a model, in order; empty if its artifact does not record them."""
    return read_record(trained, ATTEMPT, Attempt).code_versions if ATTEMPT in trained.files else []
