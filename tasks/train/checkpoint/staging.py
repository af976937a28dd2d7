"""The snapshot: what the step loop has to wait for while a checkpoint is taken.

Each rank copies only what it will write, into buffers that exist since before the first step: a copy into fresh memory
costs several times as much, for the pages that the kernel has to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Shape = tuple[str, tuple[int, ...], torch.dtype, bool]


def shapes_of(tensors: Mapping[str, Tensor]) -> list[Shape]:
    """What a plan depends on: name, size, dtype of every tensor, and whether it is sharded."""
    return sorted((name, tuple(t.shape), t.dtype, isinstance(t, DTensor)) for name, t in tensors.items())


def owners(shapes: Sequence[Sequence[Shape]]) -> dict[str, int]:
    """Which rank writes each tensor that several ranks hold whole; sharded ones are written by all.

    Largest first to the rank with the least so far: every rank's share of the bytes is about the same.
    """
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, of_rank in enumerate(shapes):
        for name, size, dtype, sharded in of_rank:
            if not sharded:
                holders.setdefault(name, []).append(rank)
                sizes[name] = torch.Size(size).numel() * dtype.itemsize
    load = [0] * len(shapes)
    chosen = {}
    for name in sorted(holders, key=lambda name: (-sizes[name], name)):
        rank = min(holders[name], key=lambda r: (load[r], r))
        chosen[name] = rank
        load[rank] += sizes[name]
    return chosen


class Buffers:
    """One host buffer for each tensor that this rank writes, used again for every checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor], chosen: Mapping[str, int], rank: int) -> None:
        # Sorted: an optimiser that was restored lists its state in another order, and the files must not show it.
        self._mine = sorted(name for name, t in tensors.items() if isinstance(t, DTensor) or chosen[name] == rank)
        self._buffers = {name: touched(local(tensors[name])) for name in self._mine}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's tensors as they are now. Returns when the copies are complete."""
        for name in self._mine:
            self._buffers[name].copy_(local(tensors[name]).detach(), non_blocking=True)
        if any(tensors[name].is_cuda for name in self._mine):
            torch.cuda.synchronize()
        return {name: like(tensors[name], self._buffers[name]) for name in self._mine}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def touched(tensor: Tensor) -> Tensor:
    """A host buffer of this size and type whose pages are there; pinned for a GPU's tensor, so that copies overlap."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).zero_()


def like(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The buffer in the role of ``tensor``: a shard knows its place in the whole."""
    if not isinstance(tensor, DTensor):
        return buffer
    return DTensor.from_local(
        buffer, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
