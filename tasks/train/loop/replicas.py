"""The model on every rank: DDP, and what it leaves to its users."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tasks.distributed.process_group import Group
from tasks.logs import logger
from tasks.models.factory import Predictor, zeros
from tasks.train.loop.probe import ROWS, Traits, undone

LOG = logger("train")


def replicate(model: Predictor, traits: Traits, group: Group) -> DistributedDataParallel:
    """Wrap the model so that backward passes average the gradient over all ranks.

    DDP broadcasts all buffers before every forward pass, constant ones too, so that is switched off;
    :func:`broadcast_buffers` does it for those that change. Two passes over zeros make DDP rebuild its gradient buckets
    before the first training step: it does so after its first backward pass, which changes the order of its sums. A
    resumed process would do so after its first *resumed* step, and from three ranks on its numbers would differ from
    those of an uninterrupted run.
    """
    if traits.unused and group.rank == 0:
        LOG.warning("%d parameters take no part in the loss: %s", len(traits.unused), ", ".join(traits.unused[:3]))
    ddp = DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        forward_sync_buffers=False,
        find_unused_parameters=bool(traits.unused),
    )
    with undone(model):
        inputs = [x.to(group.device) for x in zeros(model.signature, ROWS)]
        for _ in range(2):
            (ddp(*inputs).sum() * 0).backward()
    return ddp


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
