"""The training loss, and the evaluation on a held-out split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slipstream.artifacts.prepared.data import Signature
from slipstream.models.factory import Predictor
from slipstream.train.data.loader import Batch
from slipstream.train.optim.precision import autocast


@dataclass(frozen=True)
class SplitMetrics:
    """Mean loss, and accuracy (classification) or RMSE (regression)."""

    loss: float
    accuracy: float | None = None
    rmse: float | None = None


def loss_sum(
    signature: Signature,
    outputs: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """The sum of the rows' losses, multiplied by ``weight`` ``[rows]`` if there is one.

    For tokens the loss is the mean cross-entropy of the row's logits ``[length, tokens]`` and next tokens. For a
    classification it is the cross-entropy of logits ``[rows, classes]`` and int32 classes ``[rows]``; for a
    regression it is the squared error of values ``[rows, 1]`` and float32 targets ``[rows]``, in units of the target's
    variance.
    """
    if signature.task == "classification":
        reduction = "sum" if weight is None else "none"
        loss = functional.cross_entropy(outputs, target.long(), reduction=reduction, label_smoothing=label_smoothing)
    elif signature.task == "next token":
        logits = outputs.transpose(1, 2)
        loss = functional.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing).mean(dim=1)
    else:
        loss = ((outputs[:, 0] - target) / signature.target_std) ** 2
    return loss.sum() if weight is None else (loss * weight).sum()


def correct_sum(signature: Signature, outputs: Tensor, target: Tensor) -> Tensor:
    """The number of correctly classified rows, the sum of the rows' shares of correct tokens, or the sum of squared
    errors in units of the target squared."""
    if signature.task == "next token":
        return (outputs.argmax(dim=2) == target).double().mean(dim=1).sum()
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
        outputs, target = outputs[: batch.rows].float(), batch.target[: batch.rows]
        sums[0] += loss_sum(model.signature, outputs, target)
        sums[1] += correct_sum(model.signature, outputs, target)
        sums[2] += batch.rows
    model.train(was_training)
    dist.all_reduce(sums)
    loss, correct, rows = sums.tolist()
    if model.signature.task != "regression":
        return SplitMetrics(loss / rows, accuracy=correct / rows)
    return SplitMetrics(loss / rows, rmse=math.sqrt(correct / rows))
