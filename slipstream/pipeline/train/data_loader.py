"""Data loader that prefetches batches from stored blocks to the device.

One thread verifies every block when an epoch first uses it, gathers the rows of a batch into a reused buffer and copies
them to the device on a separate stream. This work (hashing, copying) releases the GIL, whereas worker processes would
have to send every byte through a pipe or shared memory. Small batches are read and handed over several at a time,
because every handover between the threads contends for the GIL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice, pairwise
from queue import Empty, Queue, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.pipeline.train.batch_buffers import HostBuffer, make_buffer
from slipstream.pipeline.train.config import AugmentConfig
from slipstream.pipeline.train.data_order import BatchPlan, GlobalOrder, StoredBlocks, StoredOrder
from slipstream.pipeline.train.device_clock import same_gpu
from slipstream.pipeline.train.documents import DocumentLayout
from slipstream.pipeline.train.loop.augmentation import Augmentation
from slipstream.pipeline.train.telemetry.step_times import LoaderTimes
from slipstream.shared.artifacts.format import DamagedArtifact
from slipstream.shared.artifacts.prepared.data import Block, PreparedData, Signature
from slipstream.shared.artifacts.prepared.streamed import StreamedData
from slipstream.shared.distributed.process_group import RankContext

#: Number of buffers: one in use by the consumer, one ready, one being filled.
BUFFERS = 3
#: Maximum bytes and batches of a buffer, which holds at least one batch. Batches of a buffer are handed over together.
BUFFER_BYTES, BUFFER_BATCHES = 1 << 18, 16
#: Seconds between two calls of ``waiting`` while a batch is not ready.
PATIENCE_S = 1.0


class Batch(NamedTuple):
    """One rank's batch, as views of a reused buffer of whole records.

    So the row stride of tensors is a record's size. The tensors are valid until the next batch is requested; on a GPU,
    for all work enqueued on the current stream by then.
    """

    #: Tensors ``[rows, *shape]`` in the signature's order.
    inputs: tuple[Tensor, ...]
    #: Labels ``[rows]``; next tokens ``[rows, length]``, int64, with ``NOT_LEARNED`` for those without loss.
    target: Tensor
    #: Number of this rank's rows; tensor rows after these are padding.
    rows: int
    #: Number of rows of the global batch; in an evaluation, of this rank's batch.
    size: int
    #: Number of samples that the run has consumed including this batch.
    consumed: int
    #: Seconds that the consumer waited for the batch.
    wait: float
    #: Weights of the rows, float32 ``[rows]`` of mean 1; None without weights.
    weight: Tensor | None = None
    #: Bounds of documents, int32 ``[micro-batches, documents + 1]``; None if they are not asked for, or too many.
    documents: Tensor | None = None


def training_batches(  # noqa: PLR0913 - the data to read, and options of its consumer
    prepared: PreparedData,
    order: GlobalOrder,
    group: RankContext,
    start: int = 0,
    stop: int | None = None,
    *,
    padded: int = 0,
    waiting: Callable[[], None] | None = None,
    times: LoaderTimes | None = None,
    documents: DocumentLayout | None = None,
    augment: Sequence[AugmentConfig] = (),
) -> Generator[Batch, None, None]:
    """Return this rank's batches of the training split on its device, from ``start`` consumed samples on.

    ``group`` gives this rank's position among the data-parallel ranks. Batches of fewer than ``padded`` rows are padded
    with copies of their first row; empty batches with zeros. Without ``stop`` the iterator is endless. ``waiting`` is
    called about every second while a batch is not ready; an exception from it ends the wait. ``documents`` asks for the
    bounds of documents in batches of its size, ``augment`` changes the images. Raises ``DamagedArtifact`` if a block's
    digest is wrong. The reading thread ends when the iterator is exhausted, closed or garbage-collected; it adds its
    timings to ``times``.
    """
    stored, largest = StoredRows(prepared, "train", order.blocks), -(-order.largest // group.world)
    rows = max(padded, largest)
    augmentation = Augmentation(augment, prepared.signature, order, group) if augment else None
    buffers = make_buffers(
        rows, prepared.signature, group.device, stored.streamed, documents=documents, augmentation=augmentation
    )
    return prefetch_batches(order.plans(group.rank, group.world, start, stop), stored, buffers, waiting, padded, times)


def evaluation_batches(  # noqa: PLR0913 - as above
    prepared: PreparedData,
    split: str,
    batch_size: int,
    group: RankContext,
    *,
    padded: int = 0,
    rounds: int = 0,
    waiting: Callable[[], None] | None = None,
    documents: DocumentLayout | None = None,
) -> Iterator[Batch]:
    """Return one pass over this rank's contiguous rows of ``split``, in stored order.

    Arguments are as in :func:`training_batches`. Ranks may have different numbers of batches; ``rounds`` is a minimum,
    reached by adding empty batches. ``size`` of a batch is the number of this rank's rows.
    """
    order = StoredOrder(stored_blocks(prepared, split), batch_size)
    stored = StoredRows(prepared, split, order.blocks)
    most = max(rounds, order.batches(group.rank, group.world))
    rows = max(padded, order.largest)
    buffers = make_buffers(rows, prepared.signature, group.device, stored.streamed, most, documents)
    return prefetch_batches(order.plans(group.rank, group.world, rounds), stored, buffers, waiting, padded)


def stored_blocks(prepared: PreparedData, split: str) -> StoredBlocks:
    """Return how the rows of a split are stored: segments, block size and shuffling."""
    return StoredBlocks(prepared.segment_rows(split), prepared.block_rows(split), prepared.shuffled_rows(split))


def prefetch_batches(
    plans: Iterator[BatchPlan],
    stored: StoredRows,
    buffers: list[HostBuffer],
    waiting: Callable[[], None] | None,
    padded: int = 0,
    times: LoaderTimes | None = None,
) -> Generator[Batch, None, None]:
    """Yield the planned batches, which a background thread reads into ``buffers``.

    Errors of the thread are raised in the consumer.
    """
    # Before Python 3.13 SimpleQueue.get never returns if a signal's handler ends after the timeout.
    ready: Queue[Ready] = Queue()
    free: SimpleQueue[HostBuffer | None] = SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    choose_gpu = same_gpu()

    def read() -> None:
        choose_gpu()
        read_batches(plans, stored, free, ready, times or LoaderTimes())

    thread = threading.Thread(target=read, name="loader", daemon=True)
    thread.start()
    try:
        while True:
            requested = time.perf_counter()
            item = next_ready(ready, waiting)
            wait = time.perf_counter() - requested
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            buffer, filled = item
            for index, plan in enumerate(filled):
                rows = len(plan.rows)
                inputs, target, weight = buffer.tensors(index, max(rows, padded))
                bounds = buffer.documents(index)
                yield Batch(inputs, target, rows, plan.size, plan.consumed, wait, weight, bounds)
                wait = 0.0
            buffer.release()
            free.put(buffer)
    finally:
        free.put(None)
        # With a timeout, because the thread may be waiting for a disk; it is a daemon.
        thread.join(PATIENCE_S)


def next_ready(ready: Queue[Ready], waiting: Callable[[], None] | None) -> Ready:
    """Return the next item of the reading thread; call ``waiting`` every second until it is there."""
    while True:
        try:
            return ready.get(timeout=PATIENCE_S)
        except Empty:
            if waiting:
                waiting()


def read_batches(
    plans: Iterator[BatchPlan],
    stored: StoredRows,
    free: SimpleQueue[HostBuffer | None],
    ready: Queue[Ready],
    times: LoaderTimes,
) -> None:
    """Fill free buffers by the plans, in the reading thread.

    Ends after the last plan, or when ``free`` yields None.
    """
    plans = stored.when_local(plans)
    try:
        while (buffer := free.get()) is not None:
            began = time.perf_counter()
            chosen = list(islice(plans, buffer.batches))
            local = time.perf_counter()
            intact, damage = stored.verified(chosen)
            verified = gathered = sent = augmented = time.perf_counter()
            if intact:
                stored.gather(buffer.row_numbers(intact), buffer.records)
                buffer.clear(intact)
                buffer.find_documents(intact)
                buffer.draw(intact)
                gathered = time.perf_counter()
                buffer.send(len(intact))
                sent = time.perf_counter()
                buffer.augment(intact)
                augmented = time.perf_counter()
                ready.put((buffer, intact))
            times.store += local - began
            times.verification += verified - local
            times.gathering += gathered - verified
            times.copy += sent - gathered
            times.augmentation += augmented - sent
            if damage:
                raise damage
            if len(chosen) < buffer.batches:
                ready.put(None)
                return
    except BaseException as error:
        ready.put(error)


class StoredRows:
    """Memory-mapped rows of a split, with verification of every block before use."""

    def __init__(self, prepared: PreparedData, split: str, blocks: StoredBlocks) -> None:
        self._artifact = prepared.artifact
        self._stream = prepared.stream if isinstance(prepared, StreamedData) else None
        self._stored = blocks
        self._names = prepared.segments(split)
        # As plain arrays, because slicing a memmap is slow.
        self._maps = [np.asarray(prepared.mapped(name)) for name in self._names]
        self._starts = np.cumsum(blocks.segments) - blocks.segments

    @property
    def streamed(self) -> bool:
        """True if rows come from a store, so that batches may be late."""
        return self._stream is not None

    def when_local(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """Yield every plan once the blocks with its rows are on this machine."""
        if self._stream is None:
            return plans
        return self._stream.prefetch((plan, self._blocks(plan)) for plan in plans)

    def _blocks(self, plan: BatchPlan) -> list[Block]:
        """Return the stored blocks that contain a plan's rows."""
        stored = self._stored
        numbers = np.unique(np.searchsorted(stored.first, plan.rows, side="right") - 1).tolist()
        return [(self._names[stored.segment[number]], int(stored.within[number])) for number in numbers]

    def verified(self, plans: list[BatchPlan]) -> tuple[list[BatchPlan], DamagedArtifact | None]:
        """Return the plans before the first damaged block, and the error of that block (None if undamaged)."""
        for index, plan in enumerate(plans):
            try:
                for block in plan.blocks:
                    self._verify(block)
            except DamagedArtifact as damage:
                return plans[:index], damage
        return plans, None

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the ``rows`` (numbers, int64 ``[rows]``) to the beginning of ``out`` (uint8 ``[*, record]``)."""
        for segment, begin, end in self._runs(rows):
            # All rows are in range; mode "clip" writes into `out` directly, mode "raise" would copy twice.
            within_segment = rows[begin:end] - self._starts[segment]
            self._maps[segment].take(within_segment, axis=0, out=out[begin:end], mode="clip")

    def _runs(self, rows: np.ndarray) -> list[tuple[int, int, int]]:
        """Return the runs of ``rows`` in the same segment, as (segment, begin, end) with indices into ``rows``."""
        if len(self._maps) == 1:
            return [(0, 0, len(rows))]
        segment = np.searchsorted(self._starts, rows, side="right") - 1
        bounds = [0, *(np.flatnonzero(np.diff(segment)) + 1).tolist(), len(rows)]
        return [(int(segment[begin]), begin, end) for begin, end in pairwise(bounds) if begin < end]

    def _verify(self, block: int) -> None:
        stored = self._stored
        segment, within = int(stored.segment[block]), int(stored.within[block])
        start = within * stored.block_rows
        data = self._maps[segment][start : start + int(stored.length[block])]
        self._artifact.check_block(self._names[segment], within, data)


def padding_inputs(rows: int, signature: Signature, device: torch.device) -> tuple[Tensor, ...]:
    """Return model inputs of ``rows`` zero rows, with the memory layout of a batch."""
    buffer = make_buffer(1, rows, signature, device)
    buffer.records[:] = 0
    buffer.send(1)
    return buffer.tensors(0, rows)[0]


def make_buffers(
    rows: int,
    signature: Signature,
    device: torch.device,
    streamed: bool,
    most: int | None = None,
    documents: DocumentLayout | None = None,
    augmentation: Augmentation | None = None,
) -> list[HostBuffer]:
    """Return the buffers of one iterator, for at most ``most`` batches of ``rows`` records each.

    With ``streamed`` rows a buffer holds one batch, because a late one would delay earlier ones.
    """
    batches = 1 if streamed else min(BUFFER_BATCHES, BUFFER_BYTES // max(1, rows * signature.record.itemsize))
    if most is not None:
        batches = min(batches, -(-most // BUFFERS))
    return [make_buffer(max(1, batches), rows, signature, device, documents, augmentation) for _ in range(BUFFERS)]


#: Item of the reading thread: a buffer with its batches' plans, an error, or None at the end.
Ready = tuple[HostBuffer, list[BatchPlan]] | BaseException | None
