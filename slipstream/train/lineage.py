"""The trained models that a training goes on from and learns from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.errors import UserError
from slipstream.models.config import ModelConfig, TeachingConfig
from slipstream.models.factory import Predictor, build
from slipstream.models.trained import Architecture, TrainedModel
from slipstream.settings import to_dict
from slipstream.train.config import TrainingConfig
from slipstream.train.loop.teacher import Teacher
from slipstream.train.request import TrainingRequest


@dataclass(frozen=True)
class Lineage:
    """``start`` gives the network and its first weights, without it both are fresh; ``teacher`` is learnt from beside
    the labels."""

    start: TrainedModel | None
    teacher: TrainedModel | None
    teaching: TeachingConfig

    @classmethod
    def open(cls, request: TrainingRequest, data: PreparedData) -> Lineage:
        """Raises ``UserError`` if one of the models is of data with other inputs or outputs or of a factory that the
        request does not name, or if the network shall be divided."""
        if request.training.parallel.divides and (request.start or request.teacher):
            raise UserError(
                "training.parallel: a network that is compressed cannot be divided; expected no shard, pipeline or "
                "tensor"
            )
        start, teacher = (opened(each, request.factory, data) for each in (request.start, request.teacher))
        return cls(start, teacher, request.teaching)

    def architecture(self, model: ModelConfig, data: PreparedData) -> Architecture:
        """Of the network that is trained; ``model`` is that of a training from scratch."""
        return self.start.architecture if self.start else Architecture(model, data.signature)

    def begin(self, architecture: Architecture, training: TrainingConfig) -> Predictor:
        """The network with the weights that training begins with, in training mode."""
        if self.start:
            return self.start.load().train()
        return build(architecture.config, architecture.signature, training.seed, empty=training.parallel.divides)

    def teacher_on(self, device: torch.device, precision: str) -> Teacher | None:
        """The teacher that computes there. Loading it seeds torch's random generators."""
        if self.teacher is None:
            return None
        return Teacher(self.teacher.load().to(device).requires_grad_(False), self.teaching, precision)

    def identity(self) -> dict[str, Any]:
        """What must equal the checkpoint's to resume it; empty for a training from scratch on labels alone."""
        found: dict[str, Any] = {}
        if self.start:
            found["start"] = self.start.artifact.fingerprint
        if self.teacher:
            found |= {"teacher": self.teacher.artifact.fingerprint, "teaching": to_dict(self.teaching)}
        return found


def opened(directory: Path | None, factory: str, data: PreparedData) -> TrainedModel | None:
    if directory is None:
        return None
    model = TrainedModel.open(directory, factory)
    if model.signature != data.signature:
        raise UserError(
            f"{directory}: this model has other inputs or outputs than the prepared data; expected the data that it "
            "was trained on, or data prepared alike (data.earlier)"
        )
    return model
