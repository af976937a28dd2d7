"""One optimiser step over one global batch, which is divided among the ranks and into micro-batches."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tasks.distributed.process_group import Group
from tasks.models.factory import zeros
from tasks.train.checkpoint.random_state import capture_random_state, restore_random_state
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import Batch
from tasks.train.loop.objective import loss_sum
from tasks.train.loop.precision import autocast
from tasks.train.loop.schedule import learning_rate
from tasks.train.loop.state import TrainingState


def make_optimizer(model: torch.nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter 2019) without weight decay for biases and normalisation layers."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    undecayed = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate)


def warm_up_ddp_buckets(ddp: DistributedDataParallel, state: TrainingState, group: Group) -> None:
    """Run two passes over zeros, so that DDP rebuilds its gradient buckets before the first training step.

    DDP rebuilds them after its first backward pass, which changes the order of its sums. Without the warm-up a resumed
    process would do so after its first *resumed* step, and from three ranks on its numbers would differ from those of
    an uninterrupted run. Random state and the model's buffers are restored.
    """
    random = capture_random_state()
    buffers = {name: buffer.clone() for name, buffer in state.model.named_buffers()}
    inputs = [x.to(group.device) for x in zeros(state.model.signature, 1)]
    for _ in range(2):
        (ddp(*inputs).sum() * 0).backward()
    state.optimizer.zero_grad(set_to_none=True)
    for name, buffer in state.model.named_buffers():
        buffer.copy_(buffers[name])
    restore_random_state(random)


def micro_batches(rows: int, pieces: int) -> list[slice]:
    """Divide ``rows`` rows into at most ``pieces`` slices of nearly equal length; one empty slice if there are none."""
    pieces = max(1, min(rows, pieces))
    return [slice(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]


def train_step(
    ddp: DistributedDataParallel,
    state: TrainingState,
    config: TrainingConfig,
    group: Group,
    precision: str,
    batch: Batch,
    total_steps: int,
) -> Tensor:
    """Run one step on this rank's share of a global batch; return the sum of the share's losses.

    The gradient is that of the mean over the *global* batch of G rows, for any number of ranks: each rank's sum is
    scaled by W/G, since DDP averages over the W ranks. Row weights do not change this scale, as their mean is 1: over
    an epoch a row of weight 2 counts like two rows of weight 1.
    """
    rate = learning_rate(state.progress.step, total_steps, config.learning_rate, config.warmup)
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = rate
    pieces = micro_batches(len(batch.target), config.accumulation)
    total = torch.zeros((), device=group.device)
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        with nullcontext() if last else ddp.no_sync():
            if len(batch.target):
                with autocast(precision, group.device):
                    outputs = ddp(*(x[piece] for x in batch.inputs))
                weight = None if batch.weight is None else batch.weight[piece]
                loss = loss_sum(
                    state.model.signature, outputs.float(), batch.target[piece], config.label_smoothing, weight
                )
            else:
                # A rank may have no rows of a short last batch; it still takes part in the all-reduce of the gradient.
                loss = ddp(*(x.to(group.device) for x in zeros(state.model.signature, 1))).sum() * 0
            state.scaler.scale(loss * (group.world / batch.size)).backward()
        total += loss.detach()
    if config.clip_norm:
        state.scaler.unscale_(state.optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.clip_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    return total
