"""One optimiser step over one global batch, which is divided among the ranks and into micro-batches.

Nothing in a step makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.distributed.process_group import Group
from slipstream.models.arithmetic import autocast
from slipstream.train.config import TrainingConfig
from slipstream.train.data_loader import Batch
from slipstream.train.loop.objective import loss_sum
from slipstream.train.loop.optimizer import factor_or_nan, judge, learning_rate, may_exceed, update
from slipstream.train.loop.probe import ROWS
from slipstream.train.loop.state import TrainingState
from slipstream.train.telemetry.marks import StepMarks


class StepResult(NamedTuple):
    """Scalars on the device: the sums of the losses of this rank's micro-batches, and what became of the step (see
    :meth:`.LossScaler.outcome`)."""

    losses: list[Tensor]
    outcome: Tensor


def padded_rows(largest: int, accumulation: int) -> int:
    """The rows to which every share is padded, if the largest has ``largest``: a whole number of micro-batches."""
    size = -(-largest // accumulation)
    return size * -(-largest // size)


def micro_batches(rows: int, accumulation: int) -> list[slice]:
    """Divide a padded share of ``rows`` rows into at most ``accumulation`` slices of equal length."""
    size = -(-rows // accumulation)
    return [slice(start, start + size) for start in range(0, rows, size)]


def whole_micro_batches(rows: int, accumulation: int) -> list[slice]:
    """Divide a share of ``rows`` rows, none of them padding, into at most ``accumulation`` slices of nearly equal
    length and of at least two rows, if there are two."""
    pieces = max(1, min(rows // ROWS, accumulation))
    return [slice(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]


def train_step(
    state: TrainingState,
    config: TrainingConfig,
    group: Group,
    precision: str,
    batch: Batch,
    total_steps: int,
    marks: StepMarks | None = None,
) -> StepResult:
    """Run one step on this rank's share of a global batch.

    The gradient is that of the mean over the *global* batch of G rows, for any number of ranks: each rank's sum is
    scaled by W/G, since gradients are averaged over the W ranks. Row weights do not change this scale, as their mean is
    1: over an epoch a row of weight 2 counts like two rows of weight 1. Padding has weight 0.

    If a loss or the gradient is not finite, on any rank, nothing changes on any of them but the random generators.
    ``marks`` gets the places of its phases.
    """
    rate = learning_rate(state.progress.step, total_steps, config.learning_rate, config.warmup)
    for settings in state.optimizer.param_groups:
        settings["lr"] = rate
    parameters = state.parameters
    changing = [state.model.get_buffer(name) for name in state.traits.changing]
    before = [buffer.clone() for buffer in changing]
    losses: list[Tensor] = []
    divide = whole_micro_batches if state.traits.has_batch_statistics else micro_batches
    pieces = divide(len(batch.target), config.micro_batches)
    factor = state.scaler.scaled(group.world / batch.size)

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        loss = rows_loss(state, config, batch, outputs, slice(first, first + len(outputs)))
        losses.append(loss.detach())
        # A non-finite loss makes the gradient non-finite, on all ranks.
        scaled = loss * factor_or_nan(factor, losses[-1])
        if marks:
            marks.backward_of(scaled)
        return scaled

    state.parallel.accumulate(batch.inputs, pieces, loss_of, partial(autocast, precision, group.device))
    if marks:
        marks.has_exchanged()
    state.scaler.unscale(parameters)
    verdict = judge(state.parallel.norm())
    if config.clip_norm and may_exceed(verdict.norm, config.clip_norm):
        state.parallel.clip(verdict.norm, config.clip_norm)
    update(state.optimizer, verdict)
    for parameter in parameters:  # as ``zero_grad`` does, which takes ten times as long about it
        parameter.grad = None
    state.parallel.after_step(verdict.skip)
    for buffer, old in zip(changing, before, strict=True):
        buffer.copy_(torch.where(verdict.skip.bool(), old, buffer))
    if changing and group.world > 1:
        broadcast_buffers(changing)
    if state.averaged:
        state.averaged.update(state.progress.step, verdict.skip)
    outcome = state.scaler.outcome(verdict)
    state.scaler.update(verdict)
    return StepResult(losses, outcome)


def rows_loss(state: TrainingState, config: TrainingConfig, batch: Batch, outputs: Tensor, piece: slice) -> Tensor:
    """The sum of the losses of some rows with these outputs, padding left out; 0 if this rank has no rows."""
    if not len(batch.target):
        return outputs.float().sum() * 0
    weight = None if batch.weight is None else batch.weight[piece]
    if piece.stop > batch.rows:
        real = torch.arange(piece.start, piece.stop, device=batch.target.device) < batch.rows
        weight = real.float() if weight is None else weight * real
    loss = loss_sum(state.model.signature, outputs, batch.target[piece], config.label_smoothing, weight)
    if state.teacher is None:
        return loss
    return state.teacher.blend(loss, outputs, [x[piece] for x in batch.inputs], weight)


@torch.no_grad()
def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
    """Overwrite these buffers with rank 0's, by one broadcast for each dtype."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        by_type.setdefault(buffer.dtype, []).append(buffer)
    for alike in by_type.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in alike])
        dist.broadcast(flat, src=0)
        for buffer, part in zip(alike, flat.split([buffer.numel() for buffer in alike]), strict=True):
            buffer.copy_(part.view_as(buffer))
