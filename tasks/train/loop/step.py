"""One optimiser step over one global batch, spread over the ranks and cut into micro-batches."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tasks.distributed.process_group import Group
from tasks.models.factory import zeros
from tasks.train.checkpoint.random_state import capture, put_back
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import Batch
from tasks.train.loop.objective import loss_sum
from tasks.train.loop.precision import autocast
from tasks.train.loop.schedule import learning_rate
from tasks.train.loop.state import TrainingState


def make_optimizer(model: torch.nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter 2019); biases and normalisation are not decayed."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    kept = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate)


def settle_buckets(ddp: DistributedDataParallel, state: TrainingState, group: Group) -> None:
    """Let DDP rebuild its gradient buckets before the first step that counts.

    DDP regroups its buckets after its first backward pass, which changes the order of its sums. A resumed process
    would do so after its first *resumed* step and, from three ranks on, differ from one that was never killed. Two
    passes over zeros settle it; random state and buffers are put back.
    """
    random = capture()
    buffers = {name: buffer.clone() for name, buffer in state.model.named_buffers()}
    inputs = [x.to(group.device) for x in zeros(state.model.signature, 1)]
    for _ in range(2):
        (ddp(*inputs).sum() * 0).backward()
    state.optimizer.zero_grad(set_to_none=True)
    for name, buffer in state.model.named_buffers():
        buffer.copy_(buffers[name])
    put_back(random)


def micro_batches(rows: int, pieces: int) -> list[slice]:
    """Cut ``rows`` rows into at most ``pieces`` slices of nearly equal length; one empty slice if there are none."""
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
    """Run one step on this rank's share of a global batch; return the share's loss sum.

    The gradient is that of the mean over the *global* batch whatever the number of ranks: each rank's sum is scaled by
    W/G, since DDP averages over the W ranks. Weighed rows keep that scale, as stored weights are 1 on average: over an
    epoch a row of weight 2 pulls as the same row twice would.
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
                # A short last batch may leave a rank without rows; it still takes part in the gradient's sum.
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
