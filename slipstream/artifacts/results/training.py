"""Record of a training run in the artifact of a trained model: ``history.json`` and ``attempt.json``.

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
#: Optional profile of some steps: :class:`Operations`, and their Chrome trace.
OPERATIONS, TRACE = "operations.json", "trace.json.gz"


@dataclass(frozen=True)
class LossPoint:
    """Mean training loss since the previous point, and the learning rate of the last step."""

    step: int
    epoch: float
    loss: float
    learning_rate: float


@dataclass(frozen=True)
class ValidationPoint:
    """Evaluation on the validation split: its loss, and accuracy (classification) or RMSE (regression)."""

    step: int
    epoch: float
    loss: float
    accuracy: float | None = None
    rmse: float | None = None
    #: Training loss at the previous point.
    train_loss: float | None = None


@dataclass(frozen=True)
class SkippedStep:
    """Step whose update was skipped because its loss or gradient was non-finite."""

    step: int
    #: Rows of the training split, counted through its files, that cause such a loss or gradient by themselves; at most
    #: eight per process, none if it takes several rows.
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
    """Process group that finished the run."""

    size: int
    backend: str
    device: str
    precision: str
    threads: int


@dataclass(frozen=True)
class History:
    """Contents of ``history.json``. It holds no times, so equal runs have equal histories."""

    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint
    steps_total: int
    stopped_early: bool
    parameters: int
    world: ProcessGroupFigures
    skipped: list[SkippedStep] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    #: Number of trained parameters; None (all) in older trainings.
    trained: int | None = None


@dataclass(frozen=True)
class Goodput:
    """Goodput over all attempts of a run."""

    attempts: int
    #: Executed optimiser steps, and those of them that no later attempt repeated.
    executed: int
    kept: int
    #: Seconds by activity, see :mod:`slipstream.train.fault_tolerance.goodput`.
    seconds: dict[str, float]
    #: Seconds of repeated steps.
    lost: float
    #: Wall-clock seconds of all attempts.
    wall: float
    #: End of every attempt, in order.
    ends: tuple[str, ...]
    #: ``kept / executed``; 1 before the first step.
    useful_steps: float
    #: Time of kept steps over ``wall``; 1 before the first step.
    goodput: float
    #: Published checkpoints; None in records of versions that did not count them.
    saves: int | None = None

    def __str__(self) -> str:
        lost = self.executed - self.kept
        return (
            f"{self.kept} steps kept of {self.executed} executed ({self.useful_steps:.1%}) in {self.attempts} "
            f"attempt{'s' if self.attempts > 1 else ''}, {lost} lost; goodput {self.goodput:.1%} of {self.wall:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Training speed of the attempt, without evaluations, over all processes."""

    rows_per_s: float
    #: For token rows.
    tokens_per_s: float | None = None
    #: Floating-point operations of forward and backward pass; torch counts those of matmuls and convolutions.
    flops_per_row: float
    #: Peak of all devices together in operations per second, and the source of this figure.
    peak_flops: float
    peak_from: str
    #: Model FLOPs utilisation: ``rows_per_s * flops_per_row / peak_flops``.
    utilisation: float
    #: Peak memory of a process, on its GPU or else in all.
    memory_bytes: int


@dataclass(frozen=True)
class CompiledPass:
    """Seconds of ``torch.compile``, and of a forward and backward pass over a micro-batch with and without it."""

    seconds: float
    pass_s: float
    plain_pass_s: float


@dataclass(frozen=True)
class Operation:
    """Torch operation without nested ones, or GPU kernel: its calls in the profiled steps, and its seconds."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Operations:
    """Contents of ``operations.json``: the slowest operations of ``steps`` steps on rank 0's GPU or CPU.

    ``seconds`` are those of all operations.
    """

    steps: int
    seconds: float
    operations: list[Operation]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Contents of ``attempt.json``: the attempt that finished the run, and the goodput over all attempts."""

    #: Steps that the last attempt executed.
    steps: int
    #: URI of the checkpoint that it resumed from; empty if there was none.
    resumed_from: str
    #: Seconds from snapshot to publication of its last checkpoint; 0 if it saved none.
    save_seconds: float = 0.0
    ledger: Goodput
    #: Absent if the attempt executed no step.
    throughput: Throughput | None = None
    #: Absent if nothing was compiled.
    compiled: CompiledPass | None = None
    #: Absent if no step was finished, and in older records.
    bottleneck: Bottleneck | None = None
    #: Code versions of the stage that trained, in order; empty in records of older releases.
    code_versions: list[str] = field(default_factory=list)


def record_files(history: History, attempt: Attempt, devices: TrainingDevices | None = None) -> dict[str, bytes]:
    """Return the files about a training, by name."""
    files = {HISTORY: to_json(history), ATTEMPT: to_json(attempt)}
    return files | ({DEVICES: to_json(devices)} if devices else {})


def read_history(directory: Path) -> History:
    """Return the history of the trained model in ``directory``. Raises ``DamagedArtifact`` if it is not whole."""
    return read_record(Artifact.open(directory, KIND), HISTORY, History)


def read_operations(directory: Path) -> Operations | None:
    """Return the profile, or None if no steps were profiled. Raises ``DamagedArtifact`` as the others."""
    artifact = Artifact.open(directory, KIND)
    return read_record(artifact, OPERATIONS, Operations) if OPERATIONS in artifact.files else None


def read_devices(directory: Path) -> TrainingDevices | None:
    """Return the device measurements, or None if nothing was sampled. Raises ``DamagedArtifact`` as the others."""
    artifact = Artifact.open(directory, KIND)
    return read_record(artifact, DEVICES, TrainingDevices) if DEVICES in artifact.files else None


def read_attempt(directory: Path) -> Attempt:
    """Return the attempt that finished the run. Raises ``DamagedArtifact`` if the trained model is not whole."""
    return read_record(Artifact.open(directory, KIND), ATTEMPT, Attempt)


def code_versions_of(trained: Artifact) -> list[str]:
    """Return the code versions that trained a model, in order; empty if its artifact records none."""
    return read_record(trained, ATTEMPT, Attempt).code_versions if ATTEMPT in trained.files else []
