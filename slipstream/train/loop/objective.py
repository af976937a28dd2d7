"""The training loss, a teacher's share in it, and the evaluation on a held-out split.

A teacher (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015) only computes, in evaluation
mode and on the rows that the step has anyway, so that the order of the data and what a checkpoint holds stay as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slipstream.artifacts.prepared.data import Signature
from slipstream.models.arithmetic import autocast
from slipstream.models.config import TeachingConfig
from slipstream.models.factory import Predictor
from slipstream.models.token_rows import ids_of
from slipstream.train.data_loader import Batch
from slipstream.train.loop.token_loss import token_losses


@dataclass(frozen=True)
class SplitMetrics:
    """Mean loss, and accuracy (classification) or RMSE (regression)."""

    loss: float
    accuracy: float | None = None
    rmse: float | None = None


def at_least_float32(outputs: Tensor) -> Tensor:
    """Return outputs of half precision as float32, and others unchanged."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def loss_sum(
    signature: Signature, outputs: Tensor, target: Tensor, label_smoothing: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """Return the sum of the rows' losses, multiplied by ``weight`` ``[rows]`` if there is one.

    It is computed in float32, or in float64 for float64 outputs.

    For tokens the loss is the mean cross-entropy of the row's logits ``[length, tokens]`` and next tokens; if some are
    not learned, the sum over those that are, divided by a constant, the mean number of a training row: a mean over
    those of a batch would depend on how it is divided. For a
    classification it is the cross-entropy of logits ``[rows, classes]`` and int32 classes ``[rows]``; for a
    regression it is the squared error of values ``[rows, 1]`` and float32 targets ``[rows]``, in units of the target's
    variance.
    """
    if signature.task == "next token":
        each = token_losses(outputs.flatten(0, 1), ids_of(target).flatten(), label_smoothing).view(target.shape)
        loss = (each * (target >= 0)).sum(dim=1) / signature.learned if signature.learned else each.mean(dim=1)
    elif signature.task == "classification":
        reduction, logits = "sum" if weight is None else "none", at_least_float32(outputs)
        loss = functional.cross_entropy(logits, target.long(), reduction=reduction, label_smoothing=label_smoothing)
    else:
        loss = ((at_least_float32(outputs[:, 0]) - target) / signature.target_std) ** 2
    return loss.sum() if weight is None else (loss * weight).sum()


def correct_sum(signature: Signature, outputs: Tensor, target: Tensor) -> Tensor:
    """The number of correctly classified rows, the sum of the rows' shares of correct tokens, or the sum of squared
    errors in units of the target squared."""
    if signature.task == "next token":
        right = (outputs.argmax(dim=2) == target).double()
        return (right.sum(dim=1) / signature.learned if signature.learned else right.mean(dim=1)).sum()
    if signature.task == "classification":
        return (outputs.argmax(dim=1) == target).sum()
    return ((outputs[:, 0].double() - target.double()) ** 2).sum()


@torch.no_grad()
def evaluate_split(
    model: Predictor,
    forward: Callable[..., Tensor | None],
    batches: Iterable[Batch],
    device: torch.device,
    precision: str = "fp32",
) -> SplitMetrics:
    """Mean loss and accuracy (or RMSE) of ``forward``, the model or what stands for it in evaluation mode, over the
    batches of all ranks; equal on every rank."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        with autocast(precision, device):
            outputs = forward(*batch.inputs)
        if outputs is None:  # the last stage of a pipeline has them
            continue
        outputs, target = outputs[: batch.rows], batch.target[: batch.rows]
        sums[0] += loss_sum(model.signature, outputs, target)
        sums[1] += correct_sum(model.signature, outputs, target)
        # Of tokens the losses are divided by what a training row has of them, and this split's rows may have others.
        learned = model.signature.learned
        sums[2] += (target >= 0).sum().double() / learned if learned else batch.rows
    model.train(was_training)
    dist.all_reduce(sums)
    loss, correct, rows = sums.tolist()
    if model.signature.task != "regression":
        return SplitMetrics(loss / rows, accuracy=correct / rows)
    return SplitMetrics(loss / rows, rmse=math.sqrt(correct / rows))


@dataclass(frozen=True)
class Teacher:
    """A model on the device of the training, in evaluation mode, whose weights do not change."""

    model: Predictor
    teaching: TeachingConfig
    precision: str

    def blend(self, loss: Tensor, outputs: Tensor, inputs: Sequence[Tensor], weight: Tensor | None) -> Tensor:
        """The sum of the rows' losses with the teacher's share in it.

        ``loss`` is the sum for the labels, ``outputs`` what the model that learns gives for ``inputs``;
        ``weight`` ``[rows]`` is that of the rows. The teacher's part is, for logits, the Kullback-Leibler divergence of
        both softmaxes at the temperature T, times T² so that its gradient does not shrink with T; for a regression the
        squared difference in units of the target's variance.
        """
        share = self.teaching.weight
        if not share:
            return loss
        with torch.no_grad(), autocast(self.precision, loss.device):
            teacher_outputs = at_least_float32(self.model(*inputs))
        divergence = self.divergence(at_least_float32(outputs), teacher_outputs)
        return (1 - share) * loss + share * (divergence if weight is None else divergence * weight).sum()

    def divergence(self, outputs: Tensor, teacher_outputs: Tensor) -> Tensor:
        """Return that of every row, ``[rows]``, in the type of the outputs."""
        signature = self.model.signature
        if signature.task == "regression":
            return ((outputs[:, 0] - teacher_outputs[:, 0]) / signature.target_std) ** 2
        temperature = self.teaching.temperature
        ours, theirs = (functional.log_softmax(logits / temperature, dim=-1) for logits in (outputs, teacher_outputs))
        each = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1)
        return temperature**2 * (each if each.ndim == 1 else each.mean(dim=1))
