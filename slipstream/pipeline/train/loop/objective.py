"""Training loss, distillation from a teacher, and evaluation on a held-out split.

A teacher (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015) only runs forward passes in
evaluation mode on the batch of the step. It changes neither the order of the data nor the contents of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.loop.fused_loss import fused_token_losses
from slipstream.pipeline.train.loop.goal import JudgedRows, ValidationGoal, together
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.models.arithmetic import autocast_context
from slipstream.shared.models.config import TeachingConfig
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.plan import model_plan


@dataclass(frozen=True)
class SplitMetrics:
    """Mean loss, and accuracy (classification, next token) or RMSE (regression) of a split."""

    loss: float
    accuracy: float | None = None
    rmse: float | None = None
    #: AUC, macro F1 and decision threshold, if the goal needs them; the accuracy then is that of the decisions.
    auc: float | None = None
    f1: float | None = None
    threshold: float | None = None


def at_least_float32(outputs: Tensor) -> Tensor:
    """Convert half-precision outputs to float32; return others unchanged."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def loss_sum(
    signature: Signature,
    outputs: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    *,
    fused: bool = False,
) -> Tensor:
    """Return the sum of the rows' losses, multiplied by ``weight`` ``[rows]`` if given.

    It is computed in float32, or in float64 for float64 outputs. The loss of a row depends on the task:

    - Next token: the mean cross-entropy of logits ``[length, tokens]`` and next tokens. If some tokens are not learned,
      the sum over learned tokens is divided by their mean
      number in a training row.
    - Classification: the cross-entropy of logits ``[rows, classes]`` and int32 classes ``[rows]``.
    - Regression: the squared error of values ``[rows, 1]`` and targets ``[rows]``, in units of the target's variance.
    """
    if signature.task == "next token":
        labels = target.clamp(min=0).flatten()
        each = token_losses(outputs.flatten(0, 1), labels, label_smoothing, fused=fused).view(target.shape)
        loss = over_learned_tokens(signature, each, target)
    elif signature.task == "classification":
        reduction, logits = "sum" if weight is None else "none", at_least_float32(outputs)
        loss = functional.cross_entropy(logits, target.long(), reduction=reduction, label_smoothing=label_smoothing)
    else:
        loss = ((at_least_float32(outputs[:, 0]) - target) / signature.target_std) ** 2
    return loss.sum() if weight is None else (loss * weight).sum()


def over_learned_tokens(signature: Signature, each: Tensor, target: Tensor) -> Tensor:
    """Return the sum of a row's tokens that are learned, divided as in :func:`loss_sum`, ``[rows]``."""
    return (each * (target >= 0)).sum(dim=1) / signature.learned if signature.learned else each.mean(dim=1)


def correct_sum(signature: Signature, outputs: Tensor, target: Tensor) -> Tensor:
    """Return the sum over rows from which accuracy or RMSE is computed.

    It is the number of correctly classified rows, the sum of the rows' fractions of correct tokens, or the sum of
    squared errors in units of the target squared.
    """
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
    goal: ValidationGoal = ValidationGoal(),  # noqa: B008
) -> SplitMetrics:
    """Return mean loss and accuracy (or RMSE) over the batches of all ranks, and what ``goal`` needs.

    ``forward`` computes the model's outputs, or None on pipeline stages before the last.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    judged = JudgedRows(len(model.signature.classes))
    for batch in batches:
        with autocast_context(precision, device):
            outputs = forward(*batch.inputs, **({} if batch.documents is None else {"documents": batch.documents}))
        if outputs is None:  # only the last stage of a pipeline has outputs
            continue
        outputs, target = outputs[: batch.rows], batch.target[: batch.rows]
        sums[0] += loss_sum(model.signature, outputs, target)
        sums[1] += correct_sum(model.signature, outputs, target)
        if goal.needs_rows:
            judged.add(outputs.double().cpu().numpy(), target.cpu().numpy())
        # Token losses are divided by the learned tokens of a training row; rows of this split may have a different
        # number.
        learned = model.signature.learned
        sums[2] += (target >= 0).sum().double() / learned if learned else batch.rows
    model.train(was_training)
    dist.all_reduce(sums)
    loss, correct, rows = sums.tolist()
    if goal.needs_rows:
        everyones: list[JudgedRows] = [judged] * dist.get_world_size()
        dist.all_gather_object(everyones, judged)
        return SplitMetrics(loss / rows, **together(everyones).metrics(goal.rule))
    if model.signature.task != "regression":
        return SplitMetrics(loss / rows, accuracy=correct / rows)
    return SplitMetrics(loss / rows, rmse=math.sqrt(correct / rows))


@dataclass(frozen=True)
class Teacher:
    """Frozen teacher model, in evaluation mode on the training device."""

    model: Predictor
    teaching: TeachingConfig
    precision: str

    @cached_property
    def takes_documents(self) -> bool:
        """True if attention needs no mask, given a batch's documents."""
        plan = model_plan(self.model.network)
        return plan is not None and plan.takes_documents

    def blend(self, loss: Tensor, outputs: Tensor, batch: Batch, weight: Tensor | None) -> Tensor:
        """Return the weighted mean of ``loss`` and the distillation loss, both summed over rows.

        ``loss`` is the sum for the labels of ``batch``, ``outputs`` are the student's, and ``weight`` is ``[rows]``.
        For logits the distillation loss is the Kullback-Leibler divergence of both softmaxes at the temperature T,
        times T² so that its gradient does not shrink with T, over learned tokens. For a regression it is the squared
        difference in units of the target's variance.
        """
        share = self.teaching.weight
        if not share:
            return loss
        with torch.no_grad(), autocast_context(self.precision, loss.device):
            documents = {"documents": batch.documents} if self.takes_documents and batch.documents is not None else {}
            teacher_outputs = at_least_float32(self.model(*batch.inputs, **documents))
        divergence = self.divergence(at_least_float32(outputs), teacher_outputs, batch.target)
        return (1 - share) * loss + share * (divergence if weight is None else divergence * weight).sum()

    def divergence(self, outputs: Tensor, teacher_outputs: Tensor, target: Tensor) -> Tensor:
        """Return the distillation loss of every row, ``[rows]``, in the dtype of the outputs."""
        signature = self.model.signature
        if signature.task == "regression":
            return ((outputs[:, 0] - teacher_outputs[:, 0]) / signature.target_std) ** 2
        temperature = self.teaching.temperature
        ours, theirs = (functional.log_softmax(logits / temperature, dim=-1) for logits in (outputs, teacher_outputs))
        each = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=-1)
        return temperature**2 * (each if each.ndim == 1 else over_learned_tokens(signature, each, target))


# The logits of a language model are the largest tensor of its step: 1 GiB in bf16 for 4 rows of 4,096 tokens and a
# vocabulary of 32,000. Their softmax must be in float32; it is computed in chunks, so that it never exists as a whole.
# The gradient is computed in the same pass, as in Hsu et al. 2024 ("Liger Kernel: Efficient Triton Kernels for LLM
# Training").
#: Maximum elements of a chunk: 64 MiB in float32, enough to keep a device busy.
PIECE = 1 << 24


def token_losses(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, *, fused: bool = False) -> Tensor:
    """Return the cross-entropy of every token, ``[tokens]``, in float32 (float64 for float64 logits).

    ``logits`` are ``[tokens, vocabulary]`` of any precision, ``target`` is int64 ``[tokens]``. ``label_smoothing`` is
    the fraction of every label that is spread over the whole vocabulary. ``fused`` runs Triton kernels.
    """
    if fused and logits.dtype != torch.float64:
        return fused_token_losses(logits, target, label_smoothing)
    return TokenLosses.apply(logits, target, label_smoothing)


class TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        precision = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(len(logits), dtype=precision, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        rows = max(1, PIECE // logits.shape[1])
        for first in range(0, len(logits), rows):
            piece = slice(first, first + rows)
            labels = target[piece].unsqueeze(1)
            chances = functional.log_softmax(logits[piece], dim=1, dtype=precision)
            right = chances.gather(1, labels)
            losses[piece] = -(1 - smoothing) * right.squeeze(1)
            spread = smoothing / logits.shape[1]
            if smoothing:
                losses[piece] -= smoothing * chances.mean(dim=1)
            if gradient is not None:
                # Rounded when it is written: one pass over the chunk without label smoothing.
                slope = gradient[piece]
                torch.exp(chances, out=slope) if not smoothing else slope.copy_(chances.exp_().sub_(spread))
                at_label = right.exp_().sub_(spread).add_(smoothing - 1).to(slope.dtype)
                # In one dimension: for two, some versions of torch copy strides from memory that is not pinned.
                places = torch.arange(len(labels), device=labels.device) * slope.shape[1] + labels.squeeze(1)
                slope.view(-1).scatter_(0, places, at_label.squeeze(1))
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # ``out`` makes torch multiply in float32 and round once, without a float32 tensor of this size. The gradient
        # is kept, because a pipeline schedule may run backward twice.
        return torch.mul(gradient, upstream.unsqueeze(1), out=torch.empty_like(gradient)), None, None
