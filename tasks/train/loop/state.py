"""The training state: what a checkpoint saves and a resumed run continues from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tasks.artifacts.training_record import LossPoint, ValidationPoint
from tasks.models.factory import Predictor


@dataclass
class Progress:
    """The progress of training. ``step`` counts finished optimiser steps; nothing here depends on the clock."""

    step: int = 0
    #: Evaluations since the last improvement, for early stopping.
    stale: int = 0
    #: The evaluation with the lowest loss; empty before the first one.
    best: dict[str, Any] = field(default_factory=dict)
    steps: list[LossPoint] = field(default_factory=list)
    evaluations: list[ValidationPoint] = field(default_factory=list)
    #: This rank's sum of losses since the last point of the history, and the number of its rows.
    loss_sum: float = 0.0
    loss_rows: int = 0
    stopped_early: bool = False


@dataclass
class TrainingState:
    """Model, optimiser, gradient scaler, the best weights so far, and the progress."""

    model: Predictor
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    best_weights: dict[str, Tensor]
    progress: Progress
    #: The conditions of bitwise reproducibility, see :mod:`tasks.train.survival.reproducibility`.
    conditions: dict[str, Any] = field(default_factory=dict)


def weights_of(model: Predictor) -> dict[str, Tensor]:
    """A copy of the model's weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def copy_weights(model: Predictor, into: dict[str, Tensor]) -> None:
    """Overwrite the copy ``into`` with the model's current weights."""
    for name, tensor in model.state_dict().items():
        into[name].copy_(tensor)
