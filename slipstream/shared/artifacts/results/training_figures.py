"""Measurements of a training, for planning the next run; stored in a run's summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.results.devices import AttemptSpan, TrainingDevices
from slipstream.shared.artifacts.results.training import (
    KIND,
    Goodput,
    ProcessGroupFigures,
    Throughput,
    read_attempt,
    read_devices,
    read_history,
)


@dataclass(frozen=True)
class TrainingFigures:
    """Measurements of a training over all attempts."""

    world: ProcessGroupFigures
    #: Name of its GPUs, "" on CPUs; and number of pods per attempt.
    gpu: str
    pods: int
    parameters: int
    #: Rows per global batch.
    batch_size: int
    ledger: Goodput
    #: None if the last attempt executed no step.
    throughput: Throughput | None
    #: Seconds from snapshot to publication of the last checkpoint.
    save_seconds: float
    attempts: list[AttemptSpan]
    #: Number of trained parameters; None in older trainings, which trained all.
    trained: int | None = None
    #: Code versions of the stage train, in order; empty if unknown.
    code_versions: list[str] = field(default_factory=list)

    @property
    def frozen(self) -> int:
        return 0 if self.trained is None else self.parameters - self.trained


def read_figures(directory: Path) -> TrainingFigures:
    """Return the measurements of a trained model. Raises ``DamagedArtifact`` if it is incomplete."""
    history, attempt, devices = read_history(directory), read_attempt(directory), read_devices(directory)
    training = Artifact.open(directory, KIND).made_by.get("training")
    batch_size = training.get("batch_size", 0) if isinstance(training, dict) else 0
    devices = devices or TrainingDevices([], [])
    gpus = [device.name for pod in devices.pods for device in pod.devices if device.kind == "gpu"]
    last = max((pod.attempt for pod in devices.pods), default=0)
    return TrainingFigures(
        world=history.world,
        gpu=gpu_name(gpus, attempt.throughput) if history.world.device != "cpu" else "",
        pods=max(1, sum(pod.attempt == last for pod in devices.pods)),
        parameters=history.parameters,
        trained=history.trained,
        batch_size=batch_size,
        ledger=attempt.ledger,
        throughput=attempt.throughput,
        save_seconds=attempt.save_seconds,
        attempts=devices.attempts,
        code_versions=attempt.code_versions,
    )


def gpu_name(sampled: Sequence[str], speed: Throughput | None) -> str:
    """Return the GPU name reported by the driver, else the name in ``speed.peak_from``."""
    return next(iter(sampled), speed.peak_from.removeprefix("the data sheet of ") if speed else "")
