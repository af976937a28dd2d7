"""Records in a trained model's artifact: ``history.json``, ``attempt.json`` and a profile.

The weights are read by :mod:`slipstream.shared.models.trained`, which needs torch; this module does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.records import read_record, to_json
from slipstream.shared.artifacts.results.devices import DEVICES, Bottleneck, TrainingDevices
from slipstream.shared.artifacts.results.later import Later

KIND = "train"
HISTORY = "history.json"
ATTEMPT = "attempt.json"
#: Number of steps below which a training may have had too few; evaluations before do not count for its patience.
FEW_STEPS = 200
#: Optional profile of some steps: :class:`Operations`, and a Chrome trace.
OPERATIONS, TRACE = "operations.json", "trace.json.gz"


@dataclass(frozen=True)
class ThresholdRule:
    """Rule that chooses the decision threshold of two classes: cost of an error by true class; None for macro F1."""

    costs: tuple[float, float] | None


@dataclass(frozen=True)
class LossPoint:
    """Mean training loss since the previous point, and learning rate of the step ``step``."""

    step: int
    epoch: float
    loss: float
    learning_rate: float


@dataclass(frozen=True)
class ValidationPoint:
    """Evaluation on the validation split: loss, and accuracy (classification) or RMSE (regression)."""

    step: int
    epoch: float
    loss: float
    accuracy: float | None = None
    rmse: float | None = None
    #: Training loss of the last :class:`LossPoint` before this evaluation.
    train_loss: float | None = None
    #: Area under the ROC curve, and macro F1, if the training's metric or threshold needs them.
    auc: Later[float] = None
    f1: Later[float] = None
    #: Decision threshold: probability of the second class above which it is predicted.
    threshold: Later[float] = None

    def cost(self, metric: str) -> float:
        """Return the metric as a number to minimise: one minus AUC, F1 or accuracy."""
        value = getattr(self, metric)
        assert value is not None, f"this task has no {metric}: refused before"
        return float(value) if metric in ("loss", "rmse") else 1 - value


@dataclass(frozen=True)
class SkippedStep:
    """Step whose update was skipped because its loss or gradient was non-finite."""

    step: int
    #: Rows that are non-finite even when tried alone, as indices into the training split. At most eight per process;
    #: empty if only a combination of rows is non-finite.
    rows: list[int]
    #: All rows of the step's batch, as the same indices.
    batch: list[int]


@dataclass(frozen=True)
class RollbackRange:
    """Rollback after non-finite steps: to the checkpoint at step ``after``, omitting the steps up to ``through``."""

    after: int
    through: int


@dataclass(frozen=True)
class ProcessGroupFigures:
    """Size and settings of the process group that finished the run."""

    size: int
    backend: str
    device: str
    precision: str
    threads: int


@dataclass(frozen=True)
class History:
    """Contents of ``history.json``; without times, so equal runs have equal histories."""

    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint
    steps_total: int
    stopped_early: bool
    parameters: int
    world: ProcessGroupFigures
    skipped: list[SkippedStep] = field(default_factory=list)
    left_out: list[RollbackRange] = field(default_factory=list)
    #: Number of trained parameters; None in older trainings, which trained all.
    trained: int | None = None
    #: Metric that chose the best evaluation.
    metric: Annotated[str, Field(exclude_if="loss".__eq__)] = "loss"
    rule: Later[ThresholdRule] = None

    @property
    def ended(self) -> str:
        """Sentence on an early end, or on too few steps; "" for neither."""
        falls = self.metric in ("loss", "rmse")
        if self.stopped_early:
            return (
                f"Stopped early after {self.steps_total:,} steps, as the validation {self.metric} was "
                f"{'lowest' if falls else 'highest'} at step {self.best.step:,}."
            )
        if self.steps_total < FEW_STEPS and self.best.step == self.steps_total:
            return (
                f"Too few steps: the validation {self.metric} still {'fell' if falls else 'rose'} at the last, step "
                f"{self.steps_total:,}; raise training.epochs or lower training.batch_size."
            )
        return ""


@dataclass(frozen=True)
class Goodput:
    """Goodput over all attempts of a run."""

    attempts: int
    #: Optimiser steps executed, and steps that no later attempt repeated.
    executed: int
    kept: int
    #: Seconds by activity (:data:`.ledger.ACTIVITIES`).
    seconds: dict[str, float]
    #: Seconds of repeated steps.
    lost: float
    #: Wall-clock seconds, summed over attempts.
    wall: float
    #: Reason of every attempt's end, in order.
    ends: tuple[str, ...]
    #: ``kept / executed``; 1 before the first step.
    useful_steps: float
    #: Seconds of kept steps divided by ``wall``; 1 before the first step.
    goodput: float
    #: Number of published checkpoints; None in older records.
    saves: int | None = None

    def __str__(self) -> str:
        if self.attempts == 1:
            return f"{self.executed} steps in {self.wall:.1f} s"
        return (
            f"{self.kept} steps kept of {self.executed} executed ({self.useful_steps:.1%}) in {self.attempts} "
            f"attempts, {self.executed - self.kept} lost; goodput {self.goodput:.1%} of {self.wall:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Training speed of the last attempt over all processes, without evaluations."""

    rows_per_s: float
    #: Tokens per second for token rows, else None.
    tokens_per_s: float | None = None
    #: FLOPs of forward and backward pass of matmuls and convolutions, as torch's ``FlopCounterMode`` counts them.
    flops_per_row: float
    #: Peak FLOP/s of all devices together, and the source of this figure.
    peak_flops: float
    peak_from: str
    #: Model FLOPs utilisation: ``rows_per_s * flops_per_row / peak_flops``.
    utilisation: float
    #: Peak memory of a process: of its GPU, or of the host on CPUs.
    memory_bytes: int


@dataclass(frozen=True)
class CompiledPass:
    """Seconds of ``torch.compile``, and of a forward and backward pass per micro-batch, compiled and eager."""

    seconds: float
    pass_s: float
    plain_pass_s: float
    #: Number of graphs that were compiled after the first step.
    recompilations: int = 0


@dataclass(frozen=True)
class Operation:
    """Torch operator (self time) or GPU kernel: number of calls and total seconds in the profiled steps."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Operations:
    """Contents of ``operations.json``: slowest operations of ``steps`` steps on rank 0's GPU or CPU.

    ``seconds`` is the total over all operations.
    """

    steps: int
    seconds: float
    operations: list[Operation]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Contents of ``attempt.json``: the attempt that finished the run, and the goodput over all attempts."""

    #: Number of steps that this attempt executed.
    steps: int
    #: URI of the checkpoint from which it resumed; "" if it started afresh.
    resumed_from: str
    #: Seconds from snapshot to publication of its last checkpoint; 0 without one.
    save_seconds: float = 0.0
    ledger: Goodput
    #: None if it executed no step.
    throughput: Throughput | None = None
    #: None if nothing was compiled.
    compiled: CompiledPass | None = None
    #: None if it finished no step, and in older records.
    bottleneck: Bottleneck | None = None
    #: Code versions of the stage train over all attempts, in order; empty in older records.
    code_versions: list[str] = field(default_factory=list)
    #: Device of rank 0, as :attr:`.AttemptRecord.device`; "" in older records.
    device: str = ""


def record_files(history: History, attempt: Attempt, devices: TrainingDevices | None = None) -> dict[str, bytes]:
    """Return the contents by name of the record files of a trained model's artifact."""
    files = {HISTORY: to_json(history), ATTEMPT: to_json(attempt)}
    return files | ({DEVICES: to_json(devices)} if devices else {})


def read_history(directory: Path) -> History:
    """Return the history of the trained model in ``directory``. Raises ``DamagedArtifact`` if it is incomplete."""
    return read_record(Artifact.open(directory, KIND), HISTORY, History)


def read_operations(directory: Path) -> Operations | None:
    """Return the profile of a trained model, or None without one. Raises ``DamagedArtifact`` if it is incomplete."""
    artifact = Artifact.open(directory, KIND)
    return read_record(artifact, OPERATIONS, Operations) if OPERATIONS in artifact.files else None


def read_devices(directory: Path) -> TrainingDevices | None:
    """Return a trained model's device readings, or None without. Raises ``DamagedArtifact`` if it is incomplete."""
    artifact = Artifact.open(directory, KIND)
    return read_record(artifact, DEVICES, TrainingDevices) if DEVICES in artifact.files else None


def read_attempt(directory: Path) -> Attempt:
    """Return the record of the attempt that finished the run. Raises ``DamagedArtifact`` if it is incomplete."""
    return read_record(Artifact.open(directory, KIND), ATTEMPT, Attempt)


def code_versions_of(trained: Artifact) -> list[str]:
    """Return the code versions that trained a model, in order; empty if unknown."""
    return read_record(trained, ATTEMPT, Attempt).code_versions if ATTEMPT in trained.files else []


@dataclass(frozen=True)
class LiveAttempt:
    """Progress of one attempt; steps are optimiser steps at its start, at its last checkpoint, and now."""

    number: int
    processes: int
    first_step: int
    saved_step: int
    last_step: int
    #: Seconds since its start.
    wall: float
    #: Rows per second; None before the first step.
    rows_per_s: float | None
    #: Reason of its end; "" while it runs.
    ended: str


@dataclass(frozen=True)
class LiveProgress:
    """Losses and attempts of a training up to now.

    Loss points after the last evaluation are rank 0's only.
    """

    step: int
    steps_total: int
    skipped: int
    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint | None
    attempts: list[LiveAttempt] = field(default_factory=list)
