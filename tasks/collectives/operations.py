"""The collective operations that are measured: their sizes, their inputs and their expected results.

Sizes and bandwidths follow nccl-tests (doc/PERFORMANCE.md): ``bytes`` is the size of the buffer for an all_reduce or a
broadcast, and the size of all ranks' data together for an all_gather or a reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

ITEM_BYTES = 4  # float32
ROOT = 0
#: Fills outputs before each run, so that the result of an earlier run cannot pass for this one's; occurs in no result.
POISON = -1.0
#: Periods of the test pattern. They are primes, so that a shift by a power of two always changes the data.
WAVE, SLOPE = 811, 7


@dataclass(frozen=True)
class Case:
    """One collective operation at one size on this rank, ready to run any number of times."""

    operation: str
    #: Size by the convention above, rounded down to a whole number of elements per rank.
    bytes: int
    #: Restores inputs and outputs to their state before the first run.
    reset: Callable[[], object]
    run: Callable[[], object]
    #: The result of a run and its expected value; float32, same shape.
    output: Tensor
    expected: Tensor


def pattern(rank: int, start: int, count: int, device: torch.device) -> Tensor:
    """The input of ``rank`` from position ``start`` on: float32 ``[count]``.

    It differs by rank and position, because a constant would hide data that went to the wrong place.
    """
    at = torch.arange(start, start + count, device=device)
    return (at % WAVE + rank * (at % SLOPE + 1)).float()


def summed(world: int, start: int, count: int, device: torch.device) -> Tensor:
    """The sum of :func:`pattern` over all ranks; exact for up to 2000 ranks, as all values are integers below 2**24."""
    at = torch.arange(start, start + count, device=device)
    return (world * (at % WAVE) + world * (world - 1) // 2 * (at % SLOPE + 1)).float()


def all_reduce(rank: int, world: int, size: int, device: torch.device) -> Case:
    count = size // ITEM_BYTES
    mine, buffer = pattern(rank, 0, count, device), torch.empty(count, device=device)
    # all_reduce works in place: without the reset the sums would grow with every run until they overflow.
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
    """Bus bandwidth divided by algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md).

    It is 0 for a single rank, which uses no link; for the broadcast it is always 1, by convention.
    """
    if operation == "broadcast":
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (world - 1) / world
