"""Measured operations: buffers, start, and expected result on every rank.

Sizes follow nccl-tests (doc/PERFORMANCE.md), see :class:`slipstream.shared.interconnect.profile.Measurement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.pipeline.collectives.operations.reference_data import DTYPES, POISON, ReferenceData, chunk_ranges
from slipstream.shared.machine.torch_versions import all_gather_single, reduce_scatter_single

ROOT = 0
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
#: Operations that reduce; operations that work in and out of place; operations that work in place only.
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
IN_AND_OUT_OF_PLACE = ("all_gather", "reduce_scatter")
ALWAYS_IN_PLACE = ("all_reduce", "broadcast", "reduce")


@dataclass(frozen=True)
class OperationKind:
    """Operation on a data type; ``members`` are the participating ranks, () for all."""

    operation: str
    dtype: str = "float32"
    reduction: str = ""
    in_place: bool = False
    members: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [self.operation, *(f"by {self.reduction}" for _ in [0] if self.reduction), "in", self.dtype]
        pair = f" between ranks {' and '.join(map(str, self.members))}" if self.members else ""
        return " ".join(words if self.dtype else words[:1]) + pair


@dataclass(frozen=True)
class BufferSpan:
    """Range of a buffer that holds the input of ``rank`` from ``position`` on.

    With ``rank`` None it holds the reduced inputs of all ranks.
    """

    start: int
    count: int
    rank: int | None
    position: int


Start = Callable[[], Iterable["dist.Work | None"]]


@dataclass(frozen=True)
class OperationCase:
    """One operation at one size on this rank, ready to run any number of times."""

    kind: OperationKind
    #: Size as nccl-tests defines it, rounded down to whole elements per rank.
    bytes: int
    start: Start
    #: Buffers read and written (the same if in place), and their contents before and after a checked run. Empty on a
    #: rank that sends or receives nothing.
    source: Tensor
    target: Tensor
    before: tuple[BufferSpan, ...]
    after: tuple[BufferSpan, ...]
    values: ReferenceData

    def run(self) -> None:
        """Run the operation and wait for it; on a GPU only the current stream waits."""
        for work in self.start():
            if work is not None:
                work.wait()

    def fill(self) -> None:
        """Write the reference inputs of a checked run."""
        self.target.fill_(POISON)
        for span in self.before:
            for start, count in chunk_ranges(span.count):
                at = span.start + start
                self.source[at : at + count].copy_(self.values_of(span, start, count))

    def clear(self) -> None:
        """Write zeros as inputs of timed runs, since repeated sums of other values would overflow."""
        self.source.zero_()
        self.target.zero_()

    def first_wrong(self) -> tuple[int, str, str] | None:
        """Return index, actual and expected value of this rank's first wrong output element; None if all are right."""
        for span in self.after:
            for start, count in chunk_ranges(span.count):
                at = span.start + start
                found, wanted = self.target[at : at + count].cpu(), self.values_of(span, start, count)
                wrong = self.values.first_wrong(found, wanted)
                if wrong is not None:
                    return at + wrong, f"{found[wrong].item():g}", f"{wanted[wrong].item():g}"
        return None

    def values_of(self, span: BufferSpan, start: int, count: int) -> Tensor:
        at = span.position + start
        return self.values.reduced(at, count) if span.rank is None else self.values.sent(span.rank, at, count)


def prepare_case(kind: OperationKind, size: int, device: torch.device) -> OperationCase:
    """Allocate the buffers of one case of about ``size`` bytes; all ranks of the group call this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return BUILDERS[kind.operation](kind, rank, world, size, device)


def elements(kind: OperationKind, size: int) -> int:
    return max(1, size // DTYPES[kind.dtype].itemsize)


class CheckedBuffer(NamedTuple):
    """Tensor and its reference contents: a run's input or expected output."""

    tensor: Tensor
    contents: Sequence[BufferSpan]


def make_case(
    kind: OperationKind, size: int, world: int, start: Start, source: CheckedBuffer, target: CheckedBuffer
) -> OperationCase:
    values = ReferenceData(kind.dtype, world, kind.reduction)
    return OperationCase(
        kind, size, start, source.tensor, target.tensor, tuple(source.contents), tuple(target.contents), values
    )


def empty(kind: OperationKind, count: int, device: torch.device) -> Tensor:
    # Written at once: pages of zeros that were never written share one page, which is faster than memory.
    return torch.full((count,), POISON, dtype=DTYPES[kind.dtype], device=device)


def all_reduce(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    count = elements(kind, size)
    buffer, op = empty(kind, count, device), REDUCTIONS[kind.reduction]
    start = lambda: [dist.all_reduce(buffer, op, async_op=True)]  # noqa: E731
    before, after = [BufferSpan(0, count, rank, 0)], [BufferSpan(0, count, None, 0)]
    return make_case(kind, buffer.nbytes, world, start, CheckedBuffer(buffer, before), CheckedBuffer(buffer, after))


def reduce(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    count = elements(kind, size)
    buffer, op = empty(kind, count, device), REDUCTIONS[kind.reduction]
    start = lambda: [dist.reduce(buffer, ROOT, op, async_op=True)]  # noqa: E731
    after = [BufferSpan(0, count, None, 0)] if rank == ROOT else []
    return make_case(
        kind,
        buffer.nbytes,
        world,
        start,
        CheckedBuffer(buffer, [BufferSpan(0, count, rank, 0)]),
        CheckedBuffer(buffer, after),
    )


def broadcast(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    count = elements(kind, size)
    buffer, all_of_it = empty(kind, count, device), [BufferSpan(0, count, ROOT, 0)]
    start = lambda: [dist.broadcast(buffer, ROOT, async_op=True)]  # noqa: E731
    return make_case(
        kind,
        buffer.nbytes,
        world,
        start,
        CheckedBuffer(buffer, all_of_it if rank == ROOT else []),
        CheckedBuffer(buffer, all_of_it),
    )


def all_gather(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    share = max(1, elements(kind, size) // world)
    target = empty(kind, share * world, device)
    source = target[rank * share : (rank + 1) * share] if kind.in_place else empty(kind, share, device)
    start = lambda: [all_gather_single(target, source, async_op=True)]  # noqa: E731
    after = [BufferSpan(peer * share, share, peer, 0) for peer in range(world)]
    return make_case(
        kind,
        target.nbytes,
        world,
        start,
        CheckedBuffer(source, [BufferSpan(0, share, rank, 0)]),
        CheckedBuffer(target, after),
    )


def reduce_scatter(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    share = max(1, elements(kind, size) // world)
    source, op = empty(kind, share * world, device), REDUCTIONS[kind.reduction]
    target = source[rank * share : (rank + 1) * share] if kind.in_place else empty(kind, share, device)
    start = lambda: [reduce_scatter_single(target, source, op, async_op=True)]  # noqa: E731
    before, after = [BufferSpan(0, share * world, rank, 0)], [BufferSpan(0, share, None, rank * share)]
    return make_case(kind, source.nbytes, world, start, CheckedBuffer(source, before), CheckedBuffer(target, after))


def gather(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    share = max(1, elements(kind, size) // world)
    source = empty(kind, share, device)
    target = empty(kind, share * world if rank == ROOT else 0, device)
    parts = list(target.split(share)) if rank == ROOT else None
    start = lambda: [dist.gather(source, parts, ROOT, async_op=True)]  # noqa: E731
    after = [BufferSpan(peer * share, share, peer, 0) for peer in range(world)] if rank == ROOT else []
    size = share * world * source.itemsize
    return make_case(
        kind, size, world, start, CheckedBuffer(source, [BufferSpan(0, share, rank, 0)]), CheckedBuffer(target, after)
    )


def scatter(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    share = max(1, elements(kind, size) // world)
    source = empty(kind, share * world if rank == ROOT else 0, device)
    target = empty(kind, share, device)
    parts = list(source.split(share)) if rank == ROOT else None
    start = lambda: [dist.scatter(target, parts, ROOT, async_op=True)]  # noqa: E731
    before = [BufferSpan(0, share * world, ROOT, 0)] if rank == ROOT else []
    size = share * world * target.itemsize
    return make_case(
        kind,
        size,
        world,
        start,
        CheckedBuffer(source, before),
        CheckedBuffer(target, [BufferSpan(0, share, ROOT, rank * share)]),
    )


def all_to_all(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    share = max(1, elements(kind, size) // world)
    return exchange(kind, rank, world, [[share] * world for _ in range(world)], device)


def all_to_allv(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    """Exchange one to three units between every two ranks, depending on the pair.

    A rank sends and receives the same total, but not the same amount to or from every peer.
    """
    parts = [[1 + (sender + receiver) % 3 for receiver in range(world)] for sender in range(world)]
    unit = max(1, elements(kind, size) // max(sum(line) for line in parts))
    return exchange(kind, rank, world, [[unit * part for part in line] for line in parts], device)


def exchange(
    kind: OperationKind, rank: int, world: int, counts: list[list[int]], device: torch.device
) -> OperationCase:
    """Send ``counts[i][j]`` elements from rank i to rank j."""
    sends, receives = counts[rank], [line[rank] for line in counts]
    source, target = empty(kind, sum(sends), device), empty(kind, sum(receives), device)
    start = lambda: [dist.all_to_all_single(target, source, receives, sends, async_op=True)]  # noqa: E731
    after = [BufferSpan(sum(receives[:peer]), receives[peer], peer, sum(counts[peer][:rank])) for peer in range(world)]
    most = max(max(sum(line) for line in counts), max(sum(column) for column in zip(*counts, strict=True)))
    size = most * source.itemsize
    return make_case(
        kind,
        size,
        world,
        start,
        CheckedBuffer(source, [BufferSpan(0, sum(sends), rank, 0)]),
        CheckedBuffer(target, after),
    )


def send_recv(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    """Send to the next rank and receive from the previous one, in a ring of ``kind.members`` or all ranks."""
    ring = kind.members or tuple(range(world))
    count = elements(kind, size)
    size = count * DTYPES[kind.dtype].itemsize
    if rank not in ring:
        nothing = empty(kind, 0, device)
        return make_case(kind, size, world, list, CheckedBuffer(nothing, []), CheckedBuffer(nothing, []))
    source, target = empty(kind, count, device), empty(kind, count, device)
    at = ring.index(rank)
    after, before = ring[(at + 1) % len(ring)], ring[at - 1]

    def start() -> list[dist.Work]:
        ops = [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, target, before)]
        return dist.batch_isend_irecv(ops)

    return make_case(
        kind,
        size,
        world,
        start,
        CheckedBuffer(source, [BufferSpan(0, count, rank, 0)]),
        CheckedBuffer(target, [BufferSpan(0, count, before, 0)]),
    )


def barrier(kind: OperationKind, rank: int, world: int, size: int, device: torch.device) -> OperationCase:
    nothing = torch.empty(0, device=device)
    start = lambda: [dist.barrier(async_op=True)]  # noqa: E731
    return OperationCase(kind, 0, start, nothing, nothing, (), (), ReferenceData("float32", world))


BUILDERS: dict[str, Callable[[OperationKind, int, int, int, torch.device], OperationCase]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_allv": all_to_allv,
    "send_recv": send_recv,
    "barrier": barrier,
}
