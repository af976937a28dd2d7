"""The snapshot: what the step loop has to wait for while a checkpoint is taken.

Each rank copies only what it will write, into buffers that exist since before the first step: a copy into fresh memory
costs several times as much, for the pages that the kernel has to find. And most of it need not be copied at once:
weights and the optimiser's state hold still until the optimiser's next step, for as long as the forward and the
backward pass before it take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext

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

    def stage(self, tensors: Mapping[str, Tensor], still: Collection[str]) -> Callable[[], dict[str, Tensor]]:
        """Begin to copy this rank's tensors as they are now; the returned function completes it, in any thread.

        Those in ``still`` must not change before it has returned: it copies them, the others are copied at once. It
        raises ``RuntimeError`` if one did change.
        """
        later = {name: local(tensors[name]).detach() for name in self._mine if name in still}
        versions = {name: tensor._version for name, tensor in later.items()}
        now = {name: local(tensors[name]).detach() for name in self._mine if name not in still}
        self._copy(now)
        device = next((tensor.device for tensor in (*later.values(), *now.values()) if tensor.is_cuda), None)
        # On a GPU, too, the copies run beside the next step: after what is enqueued by now, on a stream of their own.
        enqueued = torch.cuda.current_stream(device).record_event() if device else None

        def complete() -> dict[str, Tensor]:
            stream = torch.cuda.Stream(device) if device else None
            with torch.cuda.stream(stream) if stream else nullcontext():
                if stream and enqueued:
                    stream.wait_event(enqueued)
                self._copy(later)
                if stream:
                    stream.synchronize()
            changed = [name for name, tensor in later.items() if tensor._version != versions[name]]
            if changed:
                raise RuntimeError(f"{changed[0]} changed outside the optimiser's step while a checkpoint was taken")
            return {name: like(tensors[name], self._buffers[name]) for name in self._mine}

        return complete

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)


def stepped(tensors: Mapping[str, Tensor], parameters: Iterable[Tensor], of_optimizer: str) -> set[str]:
    """The names of the ``tensors`` that nothing but the optimiser's step changes: the ``parameters`` that it steps, and
    what is named below ``of_optimizer``."""
    memory = {local(parameter).untyped_storage().data_ptr() for parameter in parameters}
    return {
        name
        for name, tensor in tensors.items()
        if name.startswith(of_optimizer) or local(tensor).untyped_storage().data_ptr() in memory
    }


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
