"""Snapshot of tensors that stalls training as little as possible.

Each rank copies only the tensors that it writes, into buffers that were allocated before the first step: page faults
make copying into fresh memory several times as slow. Weights and optimiser state are copied in the background, because
they do not change before the next optimiser step. So are the best weights, which only the next evaluation may change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slipstream.pipeline.train.device_clock import wait_for

#: Alignment of tensors in a buffer, in bytes: no dtype needs more, and copies start at a cache line.
ALIGNMENT = 64
#: cudaHostRegisterPortable: pinned for all devices.
PORTABLE = 1
#: Name, shape and dtype of a tensor, and True if it is a ``DTensor`` (sharded).
TensorKey = tuple[str, tuple[int, ...], torch.dtype, bool]


def tensor_keys(tensors: Mapping[str, Tensor]) -> list[TensorKey]:
    """Return name, shape, dtype and sharding of the tensors, sorted; they determine which rank writes a tensor."""
    return sorted((name, tuple(t.shape), t.dtype, isinstance(t, DTensor)) for name, t in tensors.items())


def assign_writers(keys: Sequence[Sequence[TensorKey]]) -> dict[str, int]:
    """Return the writing rank of each unsharded tensor, given the keys of all ranks.

    Tensors are assigned from the fewest holders and the largest size on, each to the rank with the fewest bytes so far,
    so that all write about equally many.
    """
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, of_rank in enumerate(keys):
        for name, size, dtype, sharded in of_rank:
            if not sharded:
                holders.setdefault(name, []).append(rank)
                sizes[name] = torch.Size(size).numel() * dtype.itemsize
    load = [0] * len(keys)
    chosen = {}
    for name in sorted(holders, key=lambda name: (len(holders[name]), -sizes[name], name)):
        rank = min(holders[name], key=lambda r: (load[r], r))
        chosen[name] = rank
        load[rank] += sizes[name]
    return chosen


class SnapshotBuffers:
    """Host memory for snapshots of the tensors that this rank writes, reused for every checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor], chosen: Mapping[str, int], rank: int) -> None:
        # Sorted, because restoring changes the order of an optimiser's state, but not that of the files.
        self._mine = sorted(name for name, t in tensors.items() if isinstance(t, DTensor) or chosen[name] == rank)
        self._buffers = host_buffers({name: tensors[name] for name in self._mine})

    def stage(self, tensors: Mapping[str, Tensor], deferred: Collection[str]) -> Callable[[], dict[str, Tensor]]:
        """Start a snapshot of this rank's tensors, and return a function that completes and returns it in any thread.

        Arguments and errors are those of :func:`stage_copies`.
        """
        mine = {name: tensors[name] for name in self._mine}
        copies = stage_copies(self._buffers, mine, deferred)

        def complete() -> dict[str, Tensor]:
            copies()
            return {name: with_placement_of(tensor, self._buffers[name]) for name, tensor in mine.items()}

        return complete


def host_buffers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate host memory for the local parts of ``tensors``; it is pinned if any is on a GPU."""
    parts = {name: local_tensor(tensor) for name, tensor in tensors.items()}
    places = [aligned(part.nbytes) for part in parts.values()]
    # Zeroed, so that its pages are allocated.
    memory = torch.empty(sum(places), dtype=torch.uint8).zero_()
    if memory.nbytes and any(part.is_cuda for part in parts.values()):
        pin_memory(memory)
    return {
        name: place[: part.nbytes].view(part.dtype).view(part.shape)
        for (name, part), place in zip(parts.items(), memory.split(places), strict=True)
    }


def stage_copies(
    buffers: Mapping[str, Tensor], tensors: Mapping[str, Tensor], deferred: Collection[str]
) -> Callable[[], None]:
    """Start copying ``tensors`` into ``buffers``, and return a function that completes it in any thread.

    The function copies the tensors named in ``deferred``, and raises ``RuntimeError`` if any has changed since this
    call. All others are copied at once.
    """
    later = {name: local_tensor(tensor).detach() for name, tensor in tensors.items() if name in deferred}
    versions = {name: tensor._version for name, tensor in later.items()}
    now = {name: local_tensor(tensor).detach() for name, tensor in tensors.items() if name not in deferred}
    copy_tensors(buffers, now)
    device = next((tensor.device for tensor in (*later.values(), *now.values()) if tensor.is_cuda), None)
    # On a GPU the deferred copies run on their own stream, after the work enqueued so far.
    enqueued = torch.cuda.current_stream(device).record_event() if device else None

    def complete() -> None:
        stream = copy_stream(device) if device else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            if stream and enqueued:
                stream.wait_event(enqueued)
            copy_tensors(buffers, later)
        if stream:
            wait_for(stream)
        changed = [name for name, tensor in later.items() if tensor._version != versions[name]]
        if changed:
            raise RuntimeError(f"{changed[0]} changed while a checkpoint was taken")

    return complete


def copy_tensors(buffers: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    if tensors:
        targets = [local_tensor(buffers[name]) for name in tensors]
        torch._foreach_copy_(targets, list(tensors.values()), non_blocking=True)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream for deferred copies from a GPU, one per device.

    Torch hands out 32 streams in rotation, so a new stream per save would sometimes be shared with other work.
    """
    return torch.cuda.Stream(device)


def aligned(size: int) -> int:
    """Round ``size`` (bytes) up to a multiple of :data:`ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pin_memory(memory: Tensor) -> None:
    """Pin the pages of a CPU tensor for its lifetime, so that copies from GPUs run asynchronously.

    Raises ``RuntimeError`` if the pages cannot be pinned.
    """
    # With cudaHostRegister, like torch's own checkpoint stager: torch rounds pinned allocations up to a power of two.
    address, runtime = memory.data_ptr(), torch.cuda.cudart()
    if status := int(runtime.cudaHostRegister(address, memory.nbytes, PORTABLE)):
        raise RuntimeError(
            f"{memory.nbytes} bytes of host memory for checkpoints cannot be pinned: CUDA error {status}"
        )
    unpin = weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address)
    # At exit the driver may be gone; it unpins the memory of ended processes itself.
    unpin.atexit = False


def changed_later(
    tensors: Mapping[str, Tensor], parameters: Iterable[Tensor], unchanged: tuple[str, ...] = ()
) -> set[str]:
    """Return the names of ``tensors`` that do not change before the next optimiser step.

    They share memory with the optimiser's ``parameters``, or their names start with one of ``unchanged``.
    """
    memory = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in parameters}
    return {
        name
        for name, tensor in tensors.items()
        if name.startswith(unchanged) or local_tensor(tensor).untyped_storage().data_ptr() in memory
    }


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_placement_of(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Return ``buffer``, wrapped as a ``DTensor`` with the placement of ``tensor`` if ``tensor`` is a ``DTensor``."""
    if not isinstance(tensor, DTensor):
        return buffer
    # ``from_local`` would move the buffer to the mesh's device.
    return DTensor(buffer, tensor._spec, requires_grad=False)
