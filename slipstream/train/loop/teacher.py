"""A teacher inside the step: the loss that draws a network's outputs to those of a larger one.

Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015. The teacher only computes, in evaluation
mode and on the rows that the step has anyway, so that the order of the data and what a checkpoint holds stay as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.models.config import TeachingConfig
from slipstream.models.factory import Predictor
from slipstream.train.optim.precision import autocast


@dataclass(frozen=True)
class Teacher:
    """A network on the device of the training, in evaluation mode, whose weights do not change."""

    model: Predictor
    teaching: TeachingConfig
    precision: str

    def blend(self, loss: Tensor, outputs: Tensor, inputs: Sequence[Tensor], weight: Tensor | None) -> Tensor:
        """The sum of the rows' losses with the teacher's share in it.

        ``loss`` is the sum for the labels, ``outputs`` (float32) what the network that learns gives for ``inputs``;
        ``weight`` ``[rows]`` is that of the rows. The teacher's part is, for logits, the Kullback-Leibler divergence of
        both softmaxes at the temperature T, times T² so that its gradient does not shrink with T; for a regression the
        squared difference in units of the target's variance.
        """
        share = self.teaching.weight
        if not share:
            return loss
        with torch.no_grad(), autocast(self.precision, loss.device):
            taught = self.model(*inputs).float()
        divergence = self.divergence(outputs, taught)
        return (1 - share) * loss + share * (divergence if weight is None else divergence * weight).sum()

    def divergence(self, outputs: Tensor, taught: Tensor) -> Tensor:
        """Of each row, float32 ``[rows]``."""
        signature = self.model.signature
        if signature.task == "regression":
            return ((outputs[:, 0] - taught[:, 0]) / signature.target_std) ** 2
        temperature = self.teaching.temperature
        ours, theirs = (functional.log_softmax(logits / temperature, dim=-1) for logits in (outputs, taught))
        each = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1)
        return temperature**2 * (each if each.ndim == 1 else each.mean(dim=1))
