"""Everything a run is at one point: what a checkpoint saves and a resumed run continues from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tasks.models.factory import Predictor


@dataclass
class Progress:
    """How far training has come. ``step`` counts finished optimiser steps; nothing in here depends on the clock."""

    step: int = 0
    #: Evaluations since the last improvement, for early stopping.
    stale: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    #: Loss summed over the rows since the last point of the history, and how many rows those were.
    loss_sum: float = 0.0
    loss_rows: int = 0
    stopped_early: bool = False


@dataclass
class TrainingState:
    """Model, optimiser, scaler, the best weights so far, and the progress."""

    model: Predictor
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    best_weights: dict[str, Tensor]
    progress: Progress
    #: Under which the numbers come about; see :mod:`tasks.train.survival.reproducibility`.
    conditions: dict[str, Any] = field(default_factory=dict)


def weights_of(model: Predictor) -> dict[str, Tensor]:
    """A copy of the weights that further training does not change."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def copy_of_weights(model: Predictor, into: dict[str, Tensor]) -> None:
    """Overwrite an earlier copy with the weights as they are now."""
    for name, tensor in model.state_dict().items():
        into[name].copy_(tensor)
