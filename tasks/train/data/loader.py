"""From stored blocks to batches on the device, ahead of the training loop.

One thread reads ahead: it verifies each block when an epoch first touches it, gathers the rows of a batch into a
reused buffer and copies it to the device on a stream of its own. It is a thread because what it does (hashing, copying
rows) releases Python's lock, and because processes would have to send every byte through a pipe or shared memory.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tasks.artifacts.prepared import Block, PreparedData, Signature
from tasks.artifacts.streamed import StreamedData
from tasks.train.data.order import BatchPlan, GlobalOrder, Layout, StoredOrder

#: Buffers: one is the consumer's, one is ready, one is being filled.
BUFFERS = 3
#: Seconds between two looks at whether waiting for a batch still makes sense.
PATIENCE_S = 1.0


class Batch(NamedTuple):
    """One rank's share of a batch: ``inputs`` ``[share, *shape]`` in the signature's order, ``target`` ``[share]`` and,
    if rows are weighed, ``weight`` ``[share]`` (float32, on average 1).

    The tensors are views of one reused buffer of whole records, so their rows are a record's size apart. They hold
    until the next batch is asked for; on a GPU that means until the work that the current stream has by then.
    ``size`` counts the rows of the whole batch over all ranks, ``consumed`` the samples of the run after it;
    ``wait`` is the time in seconds that the consumer stood still for it.
    """

    inputs: tuple[Tensor, ...]
    target: Tensor
    size: int
    consumed: int
    wait: float
    weight: Tensor | None = None


def training_batches(
    prepared: PreparedData,
    order: GlobalOrder,
    rank: int,
    world: int,
    device: torch.device,
    start: int = 0,
    stop: int | None = None,
    *,
    waiting: Callable[[], None] | None = None,
) -> Generator[Batch, None, None]:
    """The shares that ``rank`` of ``world`` takes of the training split's batches, from ``start`` samples consumed on.

    Endless without ``stop``. ``waiting`` is called about every second while a batch does not come; what it raises ends
    the wait. Raises ``DamagedArtifact`` when a block is not what was written. The reading thread ends
    with the iterator: at its end, when it is closed, or when nobody holds it any more.
    """
    buffers = make_buffers(-(-order.largest // world), prepared.signature, device)
    return read_ahead(order.plans(rank, world, start, stop), Rows(prepared, "train", order.layout), buffers, waiting)


def evaluation_batches(
    prepared: PreparedData,
    split: str,
    batch_size: int,
    rank: int,
    world: int,
    device: torch.device,
    *,
    waiting: Callable[[], None] | None = None,
) -> Iterator[Batch]:
    """The contiguous share of ``split`` that ``rank`` of ``world`` takes, as stored, once; otherwise as in training.

    Ranks may have different numbers of batches here, and ``size`` is the number of rows in this rank's own.
    """
    order = StoredOrder(layout(prepared, split), batch_size)
    buffers = make_buffers(order.largest, prepared.signature, device)
    return read_ahead(order.plans(rank, world), Rows(prepared, split, order.layout), buffers, waiting)


def layout(prepared: PreparedData, split: str) -> Layout:
    """How the rows of a split are stored."""
    return Layout(prepared.segment_rows(split), prepared.block_rows(split), prepared.shuffled_rows(split))


def read_ahead(
    plans: Iterator[BatchPlan], stored: Rows, buffers: list[HostBuffer], waiting: Callable[[], None] | None
) -> Generator[Batch, None, None]:
    """Batches, read by a thread into ``buffers`` while the consumer works; the thread's error is raised here."""
    ready: SimpleQueue[Any] = SimpleQueue()
    free: SimpleQueue[HostBuffer | None] = SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    thread = threading.Thread(target=fill, args=(plans, stored, free, ready), name="loader", daemon=True)
    thread.start()
    try:
        while True:
            asked = time.perf_counter()
            got = taken(ready, waiting)
            wait = time.perf_counter() - asked
            if got is None:
                return
            if isinstance(got, BaseException):
                raise got
            buffer, rows, size, consumed = got
            inputs, target, weight = buffer.tensors(rows)
            yield Batch(inputs, target, size, consumed, wait, weight)
            buffer.release()
            free.put(buffer)
    finally:
        free.put(None)
        # Not for ever: a reader whose disk does not answer ends with the process.
        thread.join(PATIENCE_S)


def taken(ready: SimpleQueue[Any], waiting: Callable[[], None] | None) -> Any:
    """The next thing that the thread has ready."""
    while True:
        try:
            return ready.get(timeout=PATIENCE_S)
        except Empty:
            if waiting:
                waiting()


def fill(plans: Iterator[BatchPlan], stored: Rows, free: SimpleQueue[Any], ready: SimpleQueue[Any]) -> None:
    """The thread: a free buffer, a plan, the rows; until there is no plan or ``None`` comes for a buffer."""
    try:
        for plan in stored.there(plans):
            buffer = free.get()
            if buffer is None:
                return
            rows = len(plan.rows)
            stored.gather(plan, buffer.records[:rows])
            buffer.send(rows)
            ready.put((buffer, rows, plan.size, plan.consumed))
        ready.put(None)
    except BaseException as error:
        ready.put(error)


class Rows:
    """The stored rows of a split, memory-mapped, each block verified before its rows are used."""

    def __init__(self, prepared: PreparedData, split: str, layout: Layout) -> None:
        self._artifact = prepared.artifact
        self._stream = prepared.stream if isinstance(prepared, StreamedData) else None
        self._layout = layout
        self._names = prepared.segments(split)
        # As plain arrays: every slice of a memmap is made in Python.
        self._maps = [np.asarray(prepared.mapped(name)) for name in self._names]
        self._starts = np.cumsum(layout.segments) - layout.segments

    def there(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """The plans, each once its rows are on this machine."""
        if self._stream is None:
            return plans
        return self._stream.ahead((plan, self._blocks(plan)) for plan in plans)

    def _blocks(self, plan: BatchPlan) -> list[Block]:
        """The stored blocks that hold a plan's rows."""
        layout = self._layout
        numbers = np.unique(np.searchsorted(layout.first, plan.rows, side="right") - 1).tolist()
        return [(self._names[layout.segment[number]], int(layout.within[number])) for number in numbers]

    def gather(self, plan: BatchPlan, out: np.ndarray) -> None:
        """Verify the plan's blocks and copy its rows into ``out`` (uint8 ``[rows, record]``)."""
        for block in plan.blocks:
            self._verify(block)
        for segment, begin, end in self._runs(plan.rows):
            # "clip" writes into `out` directly, where "raise" would copy twice; all rows are in range.
            rows = plan.rows[begin:end] - self._starts[segment]
            self._maps[segment].take(rows, axis=0, out=out[begin:end], mode="clip")

    def _runs(self, rows: np.ndarray) -> list[tuple[int, int, int]]:
        """Where rows of one segment follow each other: the segment, and from which to which of ``rows``."""
        if len(self._maps) == 1:
            return [(0, 0, len(rows))]
        segment = np.searchsorted(self._starts, rows, side="right") - 1
        bounds = [0, *(np.flatnonzero(np.diff(segment)) + 1).tolist(), len(rows)]
        return [(int(segment[begin]), begin, end) for begin, end in pairwise(bounds) if begin < end]

    def _verify(self, block: int) -> None:
        layout = self._layout
        segment, within = int(layout.segment[block]), int(layout.within[block])
        start = within * layout.block_rows
        data = self._maps[segment][start : start + int(layout.length[block])]
        self._artifact.check_block(self._names[segment], within, data)


class HostBuffer:
    """Room for the records of one batch in memory, where a CPU uses them."""

    def __init__(self, rows: int, signature: Signature, pinned: bool = False) -> None:
        self._host = torch.empty((rows, signature.record.itemsize), dtype=torch.uint8, pin_memory=pinned)
        #: uint8 ``[rows, record]``, to be filled by the thread.
        self.records = self._host.numpy()
        self._fields = fields(self._host, signature)
        self._inputs = len(signature.inputs)

    def send(self, rows: int) -> None:
        """Take the first ``rows`` records to where they are used; called by the thread."""

    def tensors(self, rows: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """The inputs, the target and the weight, if there is one, of the first ``rows`` records."""
        columns = self._fields if rows == len(self.records) else tuple(field[:rows] for field in self._fields)
        inputs, (target, *weight) = columns[: self._inputs], columns[self._inputs :]
        return inputs, target, weight[0] if weight else None

    def release(self) -> None:
        """The consumer has enqueued all its work on the tensors; called by the consumer."""


class DeviceBuffer(HostBuffer):
    """Room for the records of one batch in pinned memory and on a GPU."""

    def __init__(self, rows: int, signature: Signature, device: torch.device) -> None:
        super().__init__(rows, signature, pinned=True)
        self._device = torch.empty_like(self._host, device=device)
        self._fields = fields(self._device, signature)
        self._stream = torch.cuda.Stream(device)
        # The memory may have been another's, whose work on the consumer's stream is not done yet.
        self._used = torch.cuda.current_stream(device).record_event()

    def send(self, rows: int) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            self._device[:rows].copy_(self._host[:rows], non_blocking=True)
        # The thread waits, the consumer need not: what it is given is there, and the host's buffer is free again.
        self._stream.synchronize()

    def release(self) -> None:
        self._used = torch.cuda.current_stream(self._device.device).record_event()


def make_buffers(rows: int, signature: Signature, device: torch.device) -> list[HostBuffer]:
    """The buffers of one iterator, each for ``rows`` records."""
    if device.type == "cuda":
        return [DeviceBuffer(rows, signature, device) for _ in range(BUFFERS)]
    return [HostBuffer(rows, signature) for _ in range(BUFFERS)]


def fields(records: Tensor, signature: Signature) -> tuple[Tensor, ...]:
    """Views of uint8 records ``[rows, record]``, one for each input and each label ``[rows]``."""
    found = []
    places: Any = signature.record.fields
    for spec in (*signature.inputs, *signature.labels):
        dtype = getattr(torch, spec.dtype)
        start = places[spec.name][1]
        column = records[:, start : start + math.prod(spec.shape) * dtype.itemsize].view(dtype)
        found.append(column.unflatten(1, spec.shape) if spec.shape else column[:, 0])
    return tuple(found)
