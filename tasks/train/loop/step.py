"""One optimiser step over one global batch, which is divided among the ranks and into micro-batches.

Nothing in a step makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from tasks.distributed.process_group import Group
from tasks.models.factory import zeros
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import Batch
from tasks.train.loop.gradients import clip, judge, update, verdict_of
from tasks.train.loop.objective import loss_sum
from tasks.train.loop.precision import autocast
from tasks.train.loop.probe import ROWS
from tasks.train.loop.replicas import broadcast_buffers
from tasks.train.loop.schedule import learning_rate
from tasks.train.loop.state import TrainingState


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter 2019) without weight decay for biases and normalisation layers; fused into one kernel,
    unless a parameter has a type that has none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.is_floating_point() for p in trained)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate, fused=fused)


def padded_rows(largest: int, accumulation: int) -> int:
    """The rows to which every share is padded, if the largest has ``largest``: a whole number of micro-batches."""
    size = -(-largest // accumulation)
    return size * -(-largest // size)


def micro_batches(rows: int, accumulation: int) -> list[slice]:
    """Divide a padded share of ``rows`` rows into at most ``accumulation`` slices of equal length."""
    size = -(-rows // accumulation)
    return [slice(start, start + size) for start in range(0, rows, size)]


def coupled_micro_batches(rows: int, accumulation: int) -> list[slice]:
    """Divide a share of ``rows`` rows, none of them padding, into at most ``accumulation`` slices of nearly equal
    length and of at least two rows, if there are two."""
    pieces = max(1, min(rows // ROWS, accumulation))
    return [slice(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]


def train_step(
    model: nn.Module,
    state: TrainingState,
    config: TrainingConfig,
    group: Group,
    precision: str,
    batch: Batch,
    total_steps: int,
) -> Tensor:
    """Run one step on this rank's share of a global batch, and add the share's losses to ``state.losses``.

    The gradient is that of the mean over the *global* batch of G rows, for any number of ranks: each rank's sum is
    scaled by W/G, since DDP averages over the W ranks. Row weights do not change this scale, as their mean is 1: over
    an epoch a row of weight 2 counts like two rows of weight 1. Padding has weight 0.

    If a loss or the gradient is not finite, on any rank, nothing changes on any of them but the random generators.
    Returns float64 ``[2]`` on the device: the sum of the share's losses, and 1 if the step was skipped for another
    reason than that the loss scale is still too large, else 0.
    """
    rate = learning_rate(state.progress.step, total_steps, config.learning_rate, config.warmup)
    for settings in state.optimizer.param_groups:
        settings["lr"] = rate
    parameters = state.parameters
    changing = [state.model.get_buffer(name) for name in state.traits.changing]
    before = [buffer.clone() for buffer in changing]
    losses = torch.zeros((), dtype=torch.float64, device=group.device)
    divide = coupled_micro_batches if state.traits.couples_rows else micro_batches
    pieces = divide(len(batch.target), config.accumulation)

    def divided_loss(outputs: Tensor, first: int) -> Tensor:
        loss = rows_loss(state, config, batch, outputs, slice(first, first + len(outputs)))
        losses.add_(loss.detach())
        return loss * (group.world / batch.size) * (loss.detach() * 0 + state.scaler.scale)

    if state.divided:
        forward = partial(autocast, precision, group.device)
        state.divided.accumulate(batch.inputs, pieces, divided_loss, forward)
    else:
        for index, piece in enumerate(pieces):
            last = index == len(pieces) - 1
            with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
                loss = micro_batch_loss(model, state, config, group, precision, batch, piece)
                # A loss that is no number makes the gradient none, on all ranks, though its own derivative may be
                # finite.
                (loss * (group.world / batch.size)).backward(loss.detach() * 0 + state.scaler.scale)
            losses += loss.detach()
    state.scaler.unscale(parameters)
    verdict = verdict_of(state.divided.norm()) if state.divided else judge(parameters)
    if config.clip_norm and state.divided:
        state.divided.clip(verdict.norm, config.clip_norm)
    elif config.clip_norm:
        clip(parameters, verdict, config.clip_norm)
    update(state.optimizer, verdict)
    state.optimizer.zero_grad(set_to_none=True)
    skip = verdict.skip.bool()
    for buffer, old in zip(changing, before, strict=True):
        buffer.copy_(torch.where(skip, old, buffer))
    if changing and group.world > 1:
        broadcast_buffers(changing)
    if state.averaged:
        state.averaged.update(state.progress.step)
    if state.divided is None or state.divided.counts_losses:
        state.losses += torch.where(skip, 0.0, torch.stack([losses, torch.full_like(losses, batch.rows)]))
    result = torch.stack([losses, (verdict.skip * (state.scaler.scale <= 1)).double()])
    state.scaler.update(verdict)
    return result


def micro_batch_loss(
    model: nn.Module,
    state: TrainingState,
    config: TrainingConfig,
    group: Group,
    precision: str,
    batch: Batch,
    piece: slice,
) -> Tensor:
    """The sum of the losses of one micro-batch's rows, padding left out."""
    if not len(batch.target):
        # A rank may have no rows of a short last batch; it still takes part in the all-reduce of the gradient.
        with running_statistics(state.model):
            return model(*(x.to(group.device) for x in zeros(state.model.signature, ROWS))).float().sum() * 0
    alone = state.traits.couples_rows and piece.stop - piece.start < ROWS
    with autocast(precision, group.device), running_statistics(state.model) if alone else nullcontext():
        outputs = model(*(x[piece] for x in batch.inputs))
    return rows_loss(state, config, batch, outputs, piece)


def rows_loss(state: TrainingState, config: TrainingConfig, batch: Batch, outputs: Tensor, piece: slice) -> Tensor:
    """The sum of the losses of some rows with these outputs, padding left out."""
    weight = None if batch.weight is None else batch.weight[piece]
    if piece.stop > batch.rows:
        real = torch.arange(piece.start, piece.stop, device=batch.target.device) < batch.rows
        weight = real.float() if weight is None else weight * real
    return loss_sum(state.model.signature, outputs.float(), batch.target[piece], config.label_smoothing, weight)


@contextmanager
def running_statistics(model: nn.Module) -> Iterator[None]:
    """Batch normalisation by the running statistics, which do not change: a single row has no variance."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for layer in layers:
        layer.train(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.train(True)
