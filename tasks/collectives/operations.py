"""The collectives that are measured: what each moves, and how its result is proven.

Sizes and bandwidths follow nccl-tests (doc/PERFORMANCE.md): ``bytes`` is the buffer of an all_reduce or a broadcast,
and the *whole* data of all ranks for an all_gather or a reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

ITEM_BYTES = 4  # float32
ROOT = 0
#: In no result; what an output holds before the operation, so that a result of earlier can't pass for this one's.
POISON = -1.0
#: Primes, so that no shift by a power of two, or by a rank's share of one, leaves the data as it was.
WAVE, SLOPE = 811, 7


@dataclass(frozen=True)
class Case:
    """One collective at one size on this rank, ready to run any number of times."""

    operation: str
    #: What the operation moves by the convention above; rounded down to a whole number of elements for every rank.
    bytes: int
    #: Brings inputs and outputs to where they were before the first run.
    reset: Callable[[], object]
    run: Callable[[], object]
    #: Where the result lies, and what it must be; float32, same shape.
    output: Tensor
    expected: Tensor


def pattern(rank: int, start: int, count: int, device: torch.device) -> Tensor:
    """What ``rank`` contributes at positions ``start`` and on: float32 ``[count]``, different by rank and by position.

    A constant would hide data that went to the wrong place.
    """
    at = torch.arange(start, start + count, device=device)
    return (at % WAVE + rank * (at % SLOPE + 1)).float()


def summed(world: int, start: int, count: int, device: torch.device) -> Tensor:
    """The sum of :func:`pattern` over all ranks. Whole numbers below 2**24, so exact, for up to 2000 ranks."""
    at = torch.arange(start, start + count, device=device)
    return (world * (at % WAVE) + world * (world - 1) // 2 * (at % SLOPE + 1)).float()


def all_reduce(rank: int, world: int, size: int, device: torch.device) -> Case:
    count = size // ITEM_BYTES
    mine, buffer = pattern(rank, 0, count, device), torch.empty(count, device=device)
    # In place: without the reset the sums would grow with every run until they overflow.
    return Case(
        "all_reduce",
        count * ITEM_BYTES,
        lambda: buffer.copy_(mine),
        lambda: dist.all_reduce(buffer),
        buffer,
        summed(world, 0, count, device),
    )


def all_gather(rank: int, world: int, size: int, device: torch.device) -> Case:
    share = max(1, size // ITEM_BYTES // world)
    mine, gathered = pattern(rank, 0, share, device), torch.empty(share * world, device=device)
    return Case(
        "all_gather",
        share * world * ITEM_BYTES,
        lambda: gathered.fill_(POISON),
        lambda: dist.all_gather_single(gathered, mine),
        gathered,
        torch.cat([pattern(peer, 0, share, device) for peer in range(world)]),
    )


def reduce_scatter(rank: int, world: int, size: int, device: torch.device) -> Case:
    share = max(1, size // ITEM_BYTES // world)
    mine, reduced = pattern(rank, 0, share * world, device), torch.empty(share, device=device)
    return Case(
        "reduce_scatter",
        share * world * ITEM_BYTES,
        lambda: reduced.fill_(POISON),
        lambda: dist.reduce_scatter_single(reduced, mine),
        reduced,
        summed(world, rank * share, share, device),
    )


def broadcast(rank: int, world: int, size: int, device: torch.device) -> Case:
    count = size // ITEM_BYTES
    sent, buffer = pattern(ROOT, 0, count, device), torch.empty(count, device=device)
    return Case(
        "broadcast",
        count * ITEM_BYTES,
        lambda: buffer.copy_(sent) if rank == ROOT else buffer.fill_(POISON),
        lambda: dist.broadcast(buffer, ROOT),
        buffer,
        sent,
    )


CASES: dict[str, Callable[[int, int, int, torch.device], Case]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
}


def bus_factor(operation: str, world: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md).

    It is 0 for a single rank, where no operation but the broadcast (by convention always 1) would use a link.
    """
    if operation == "broadcast":
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (world - 1) / world
