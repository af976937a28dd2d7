"""Request of a training, and the trained models that it starts from and distils from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.objective import Teacher
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.training import ValidationPoint
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.base.shape import shaped_for
from slipstream.shared.models.config import ModelConfig, TeachingConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.trained import Architecture, TrainedModel
from slipstream.shared.settings import to_dict


@dataclass(frozen=True)
class TrainingRequest:
    """Request to train a model in one attempt."""

    #: Directory with the prepared data, or a stub of it.
    prepared: Path
    model: ModelConfig
    training: TrainingConfig
    #: Directory in which rank 0 writes the trained model.
    directory: Path
    #: Checkpoint directory, a path or a store's address.
    home: str
    #: Provenance to write into the manifest of the trained model.
    made_by: Mapping[str, object]
    #: Execution and Flyte attempt that run this training.
    holder: Holder = Holder()
    #: True if another process continues the lease after training, until the model is delivered to Flyte.
    delivered_by_agent: bool = False
    #: Cloud whose preemption notices are polled; "auto" tries all clouds, "none" polls none.
    notices: str = "none"
    #: Seconds from SIGTERM to SIGKILL, in which to save and exit.
    grace_s: float = 25.0
    #: Trained model to start from, with its architecture and weights, instead of a fresh ``model``.
    start: Path | None = None
    #: Trained model to distil from; None without distillation.
    teacher: Path | None = None
    #: Settings of distillation.
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    #: The user's configured factory, the only untrusted factory that may build the start model and the teacher.
    factory: str = ""
    #: File to which rank 0 writes live progress; None disables it.
    so_far: Path | None = None
    #: Directory in which the telemetry sampler of this machine or pod stores its samples; None without a sampler.
    sampled: Path | None = None
    #: Callback after every evaluation, given on all ranks or on none. Called on rank 0 with all evaluations so far;
    #: True stops all ranks.
    told: Callable[[Sequence[ValidationPoint]], bool] | None = None
    #: Base and start adapter of ``model``, if they are already opened.
    opened: ModelOrigin | None = None

    @cached_property
    def origin(self) -> ModelOrigin:
        return self.opened or ModelOrigin(self.model)

    def for_data(self, data: PreparedData) -> TrainingRequest:
        """Return the request with the settings that the number of training rows decides."""
        rows, origin = data.training_rows, self.origin
        model = origin.model if self.start else origin.model.for_rows(rows, data.signature)
        opened = origin if model == origin.model else ModelOrigin(model)
        return replace(self, training=self.training.for_rows(rows), model=model, opened=opened)


@dataclass(frozen=True)
class Lineage:
    """Start model and teacher of a training; either may be None.

    ``start`` gives the architecture and the initial weights. ``teacher`` adds a distillation loss to that of the
    labels.
    """

    start: TrainedModel | None
    teacher: TrainedModel | None
    teaching: TeachingConfig

    @classmethod
    def open(cls, request: TrainingRequest, data: PreparedData) -> Lineage:
        """Open the models of a request.

        Raises ``UserError`` if a model has other inputs or outputs than the data, or a factory that the request does
        not name, or if the training divides the model.
        """
        if request.training.parallel.divides and (request.start or request.teacher):
            raise UserError(
                "training.parallel: a model that is compressed cannot be divided; expected no shard, pipeline or tensor"
            )
        start, teacher = (open_model(each, request.factory, data) for each in (request.start, request.teacher))
        return cls(start, teacher, request.teaching)

    def inherited(self, origin: ModelOrigin) -> dict[str, bytes]:
        if self.start:
            return self.start.inherited_files()
        return origin.base.inherited() if origin.model.base else {}

    def architecture(self, origin: ModelOrigin, data: PreparedData) -> Architecture:
        """Return the start model's architecture; without one, that configured by ``origin.model``."""
        if self.start:
            return self.start.architecture
        return Architecture(shaped_for(origin.model, data.signature, origin), data.signature)

    def begin(self, architecture: Architecture, training: TrainingConfig) -> Predictor:
        """Return the model with its initial weights, in training mode.

        It is on the meta device if its weights are filled later: from a base, or drawn by the model's rules.
        """
        if self.start:
            return self.start.load().train()
        return build_model(architecture.config, architecture.signature, training.seed, empty=True)

    def teacher_on(self, device: torch.device, precision: str) -> Teacher | None:
        """Load the teacher to ``device``; None without a teacher. Loading seeds torch's random generators."""
        if self.teacher is None:
            return None
        return Teacher(self.teacher.load().to(device).requires_grad_(False), self.teaching, precision)

    def identity(self) -> dict[str, object]:
        """Return the identity's entries for start model and teacher; empty without them."""
        identity: dict[str, object] = {}
        if self.start:
            identity["start"] = self.start.artifact.content
        if self.teacher:
            identity |= {"teacher": self.teacher.artifact.content, "teaching": to_dict(self.teaching)}
        return identity


def open_model(directory: Path | None, factory: str, data: PreparedData) -> TrainedModel | None:
    if directory is None:
        return None
    model = TrainedModel.open(directory, factory)
    if model.signature != data.signature:
        raise UserError(
            f"{directory}: this model has other inputs or outputs than the prepared data; expected the data that it "
            "was trained on, or data prepared alike (data.earlier)"
        )
    return model
