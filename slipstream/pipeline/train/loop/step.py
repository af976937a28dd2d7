"""One optimiser step over a global batch, divided among ranks and into micro-batches.

A step never makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.objective import loss_sum
from slipstream.pipeline.train.loop.optimizer import (
    check_gradient,
    clipping_divisor,
    divides_in_step,
    factor_or_nan,
    learning_rate,
    may_exceed,
    step_unless_skipped,
)
from slipstream.pipeline.train.loop.probe import ROWS, running_statistics, unchanged_after
from slipstream.pipeline.train.loop.state import TrainingState
from slipstream.pipeline.train.parallel.layout import ParallelModel
from slipstream.pipeline.train.telemetry.marks import StepMarks
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.training import SkippedStep
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.arithmetic import autocast_context
from slipstream.shared.models.factory import Predictor


class StepResult(NamedTuple):
    """Summed loss of each of this rank's micro-batches, and the step's outcome, as device scalars.

    See :meth:`.LossScaler.outcome` for the outcome.
    """

    losses: list[Tensor]
    outcome: Tensor


def padded_rows(largest: int, accumulation: int) -> int:
    """Return the number of rows to pad every rank's batch to: a multiple of the micro-batch size.

    ``largest`` is the number of rows of a rank's largest batch.
    """
    size = -(-largest // accumulation)
    return size * -(-largest // size)


def micro_batches(rows: int, accumulation: int) -> list[slice]:
    """Divide a padded batch of ``rows`` rows into at most ``accumulation`` equal slices."""
    size = -(-rows // accumulation)
    return [slice(start, start + size) for start in range(0, rows, size)]


def whole_micro_batches(rows: int, accumulation: int) -> list[slice]:
    """Divide an unpadded batch into at most ``accumulation`` slices of similar length.

    Every slice has at least two rows, if ``rows`` allows, because batch statistics need them.
    """
    pieces = max(1, min(rows // ROWS, accumulation))
    return [slice(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]


def train_step(
    state: TrainingState,
    config: TrainingConfig,
    group: RankContext,
    precision: str,
    batch: Batch,
    total_steps: int,
    marks: StepMarks | None = None,
) -> StepResult:
    """Run one step on this rank's batch, with the gradient of the mean over the *global* batch.

    If a loss or the gradient is non-finite on any rank, weights and optimiser state stay unchanged. ``marks`` receives
    the timestamps of the phases.
    """
    rate = learning_rate(state.progress.step, total_steps, config.learning_rate, config.warmup, config.schedule)
    for settings in state.optimizer.param_groups:
        settings["lr"] = rate
    parameters = state.parameters
    changing = [state.model.get_buffer(name) for name in state.traits.changing]
    before = [buffer.clone() for buffer in changing]
    losses: list[Tensor] = []
    divide = whole_micro_batches if state.traits.has_batch_statistics else micro_batches
    pieces = divide(len(batch.target), config.micro_batches)
    # For any number of ranks W the gradient is that of the mean over the global batch of G rows: every rank's sum is
    # scaled by W/G, since gradients are averaged over the ranks. Row weights do not change this scale, as their mean is
    # 1: over an epoch a row of weight 2 counts like two rows of weight 1. Padding has weight 0.
    factor = state.scaler.scaled(group.world / batch.size)

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        loss = rows_loss(state, config, batch, outputs, slice(first, first + len(outputs)))
        losses.append(loss.detach())
        # A non-finite loss makes the gradient non-finite, on all ranks.
        scaled = loss * factor_or_nan(factor, losses[-1])
        if marks:
            marks.backward_of(scaled)
        return scaled

    passes = partial(autocast_context, precision, group.device)
    state.parallel.accumulate(batch.inputs, pieces, loss_of, passes, batch.documents)
    if marks:
        marks.has_exchanged()
    state.scaler.unscale(parameters)
    verdict = check_gradient(state.parallel.norm())
    divisor = None
    if config.clip_norm and may_exceed(verdict.norm, config.clip_norm):
        if state.parallel.clips_in_step and divides_in_step(state.optimizer):
            divisor = clipping_divisor(verdict.norm, config.clip_norm)
        else:
            state.parallel.clip(verdict.norm, config.clip_norm)
    step_unless_skipped(state.optimizer, verdict, divisor)
    for parameter in parameters:  # equivalent to ``zero_grad``, which takes ten times as long
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
    """Return the sum of the losses of one micro-batch without padding; 0 if this rank has no rows."""
    if not len(batch.target):
        return outputs.float().sum() * 0
    weight = None if batch.weight is None else batch.weight[piece]
    if state.class_weights is not None:
        by_class = state.class_weights[batch.target[piece].long()]
        weight = by_class if weight is None else weight * by_class
    if piece.stop > batch.rows:
        real = torch.arange(piece.start, piece.stop, device=batch.target.device) < batch.rows
        weight = real.float() if weight is None else weight * real
    signature, smoothing = state.model.signature, config.label_smoothing
    loss = loss_sum(signature, outputs, batch.target[piece], smoothing, weight, fused=state.fused_loss)
    if state.teacher is None:
        return loss
    number = piece.start // (piece.stop - piece.start)
    documents = None if batch.documents is None else batch.documents[number : number + 1]
    inputs = tuple(x[piece] for x in batch.inputs)
    part = batch._replace(inputs=inputs, target=batch.target[piece], documents=documents)
    return state.teacher.blend(loss, outputs, part, weight)


@torch.no_grad()
def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
    """Overwrite the buffers with rank 0's values, with one broadcast per dtype."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        by_type.setdefault(buffer.dtype, []).append(buffer)
    for alike in by_type.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in alike])
        dist.broadcast(flat, src=0)
        for buffer, part in zip(alike, flat.split([buffer.numel() for buffer in alike]), strict=True):
            buffer.copy_(part.view_as(buffer))


#: Maximum number of rows that one rank reports.
NAMED = 8


def name_rows(
    step: int,
    parallel: ParallelModel,
    data: PreparedData,
    order: GlobalOrder,
    config: TrainingConfig,
    precision: str,
    group: RankContext,
) -> SkippedStep:
    """Return the rows of step number ``step`` (from 1) that cause a non-finite loss or gradient.

    Every row is tested separately with the current weights. Only losses are tested if the model is divided among ranks.
    Collective; the result is equal on all ranks. ``group`` holds the data-parallel ranks.
    """
    start, stop = order.consumed(step - 1), order.consumed(step)
    rows = next(order.plans(group.rank, group.world, start, stop)).rows
    padded = padded_rows(-(-order.largest // group.world), config.micro_batches) if not parallel.is_whole else 0
    batches = training_batches(data, order, group, start, stop, padded=padded, augment=config.augment)
    if not parallel.is_whole:
        bad = rows_of_bad_losses(parallel, next(batches), precision, group.device)
    else:
        bad = bad_rows(parallel.model, next(batches), config, precision, group.device) if len(rows) else []
    batches.close()
    everyones: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, rows[bad].tolist())
    batch = sorted(next(order.plans(0, 1, start, stop)).rows.tolist())
    return SkippedStep(step, [row for one in everyones for row in one], batch)


@torch.no_grad()
def rows_of_bad_losses(parallel: ParallelModel, batch: Batch, precision: str, device: torch.device) -> list[int]:
    """Return the positions in ``batch`` of the first :data:`NAMED` non-finite losses.

    Collective: one forward pass in evaluation mode. If several ranks have the same rows, only one of them returns any.
    """
    was_training = parallel.model.training
    parallel.model.eval()
    with autocast_context(precision, device):
        outputs = parallel.forward(*batch.inputs)
    parallel.model.train(was_training)
    if outputs is None or not parallel.counts_losses:
        return []
    signature = parallel.model.signature
    losses = (loss_sum(signature, outputs[i : i + 1], batch.target[i : i + 1]) for i in range(batch.rows))
    return [place for place, loss in enumerate(losses) if not loss.isfinite()][:NAMED]


def bad_rows(model: Predictor, batch: Batch, config: TrainingConfig, precision: str, device: torch.device) -> list[int]:
    """Return the positions of the first :data:`NAMED` rows of ``batch`` with a non-finite loss or gradient.

    Searches by bisection, and leaves the model unchanged.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]

    def finite(rows: slice) -> bool:
        with autocast_context(precision, device):
            outputs = model(*(x[rows] for x in batch.inputs))
        weight = None if batch.weight is None else batch.weight[rows]
        loss = loss_sum(model.signature, outputs, batch.target[rows], config.label_smoothing, weight)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return all(bool(x.isfinite().all()) for x in (loss, *gradients) if x is not None)

    bad: list[int] = []
    parts = [slice(0, batch.rows)]
    with unchanged_after(model), running_statistics(model):
        while parts and len(bad) < NAMED:
            part = parts.pop()
            if finite(part):
                continue
            if part.stop - part.start == 1:
                bad.append(part.start)
            else:
                middle = (part.start + part.stop) // 2
                parts += [slice(middle, part.stop), slice(part.start, middle)]
    return bad
