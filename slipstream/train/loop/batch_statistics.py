"""Models in which the rows of a micro-batch influence each other, as in batch normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

#: Batch normalisation needs two rows for a variance.
ROWS = 2


def whole_micro_batches(rows: int, accumulation: int) -> list[slice]:
    """Divide a share of ``rows`` rows, none of them padding, into at most ``accumulation`` slices of nearly equal
    length and of at least two rows, if there are two."""
    pieces = max(1, min(rows // ROWS, accumulation))
    return [slice(rows * i // pieces, rows * (i + 1) // pieces) for i in range(pieces)]


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
