"""The record of a training run inside the artifact of a trained model: ``history.json`` and ``attempt.json``.

The weights in the same artifact are read by :mod:`slipstream.models.trained`, which needs torch; this module does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

from slipstream.artifacts.format import Artifact, canonical_json

KIND = "train"
HISTORY = "history.json"
ATTEMPT = "attempt.json"
#: A profile of some steps, if it was asked for: :class:`Operations`, and Chrome's trace of them.
OPERATIONS, TRACE = "operations.json", "trace.json.gz"


class LossPoint(TypedDict):
    """The mean training loss since the point before, and the learning rate of the last step."""

    step: int
    epoch: float
    loss: float
    learning_rate: float


class ValidationPoint(TypedDict):
    """One evaluation on the validation split: its loss, and accuracy (classification) or RMSE (regression)."""

    step: int
    epoch: float
    loss: float
    accuracy: NotRequired[float]
    rmse: NotRequired[float]
    #: The training loss at the last point before.
    train_loss: NotRequired[float]


class SkippedStep(TypedDict):
    """A step whose update was skipped, as its loss or its gradient was non-finite."""

    step: int
    #: Rows of the training split, counted through its files, that give such a loss or gradient by themselves; at most
    #: eight of each process, and none where it takes several rows.
    rows: list[int]
    #: All rows of the step's batch.
    batch: list[int]


class LeftOut(TypedDict):
    """Training rolled back to the checkpoint of step ``after`` and continued with step ``through`` + 1."""

    after: int
    through: int


class ProcessGroupFigures(TypedDict):
    """The process group that finished the run."""

    size: int
    backend: str
    device: str
    precision: str
    threads: int


class History(TypedDict):
    """The contents of ``history.json``. It holds no times, so that equal runs have equal histories."""

    steps: list[LossPoint]
    evaluations: list[ValidationPoint]
    best: ValidationPoint
    steps_total: int
    stopped_early: bool
    parameters: int
    world: ProcessGroupFigures
    skipped: NotRequired[list[SkippedStep]]
    left_out: NotRequired[list[LeftOut]]


class Goodput(TypedDict):
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
    ends: list[str]
    #: ``kept / executed``.
    useful_steps: float
    #: Time of steps that were kept over ``wall``.
    goodput: float


class Throughput(TypedDict):
    """How fast the attempt trained, without evaluations, over all processes."""

    rows_per_s: float
    #: Of rows of tokens.
    tokens_per_s: NotRequired[float]
    #: Floating-point operations of forward and backward pass; torch counts those of products and convolutions.
    flops_per_row: float
    #: What all devices together can do at most in a second, and where that is from.
    peak_flops: float
    peak_from: str
    #: Model FLOPs utilisation: ``rows_per_s * flops_per_row / peak_flops``.
    utilisation: float
    #: The most that a process had at once, on its GPU, or on a CPU in all.
    memory_bytes: int


class CompiledPass(TypedDict):
    """What ``torch.compile`` took, and a pass over a micro-batch with it and without, forward and backward: seconds."""

    seconds: float
    pass_s: float
    plain_pass_s: float


class Operation(TypedDict):
    """An operation of torch: how often it ran in the steps, and its seconds without those of operations in it."""

    name: str
    calls: int
    seconds: float


class Operations(TypedDict):
    """The contents of ``operations.json``: of ``steps`` steps of rank 0 the operations that took longest, on its GPU or
    CPU. ``seconds`` are those of all operations."""

    steps: int
    seconds: float
    operations: list[Operation]


class Attempt(TypedDict):
    """The contents of ``attempt.json``: the attempt that finished the run, and the goodput over all attempts."""

    #: Steps that the last attempt executed.
    steps: int
    #: The URI of the checkpoint that it resumed from; empty if there was none.
    resumed_from: str
    #: From snapshot to publication of the last checkpoint that it saved; 0 if it saved none.
    save_seconds: NotRequired[float]
    ledger: Goodput
    #: Absent if the attempt executed no step.
    throughput: NotRequired[Throughput]
    #: Absent if nothing was compiled.
    compiled: NotRequired[CompiledPass]


def record_files(history: History, attempt: Attempt) -> dict[str, bytes]:
    """The files about a training, by name."""
    return {HISTORY: canonical_json(history), ATTEMPT: canonical_json(attempt)}


def read_history(directory: Path) -> History:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole trained model."""
    return Artifact.open(directory, KIND).read_json(HISTORY)


def read_operations(directory: Path) -> Operations | None:
    """None if no steps were profiled. Raises ``DamagedArtifact`` as the others."""
    artifact = Artifact.open(directory, KIND)
    return artifact.read_json(OPERATIONS) if OPERATIONS in artifact.files else None


def read_attempt(directory: Path) -> Attempt:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole trained model."""
    return Artifact.open(directory, KIND).read_json(ATTEMPT)
