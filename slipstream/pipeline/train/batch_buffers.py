"""Buffers of batches: whole records in host memory, and their copies on a GPU."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from slipstream.pipeline.train.data_order import BatchPlan
from slipstream.pipeline.train.device_clock import wait_for
from slipstream.pipeline.train.documents import DocumentLayout
from slipstream.pipeline.train.loop.augmentation import Augmentation
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.artifacts.prepared.token_rows import read_tokens

#: Alignment of batches in a buffer, in bytes, so that results do not depend on a batch's position in its buffer.
ALIGNMENT = 64


class HostBuffer:
    """Host buffer for ``batches`` batches of at most ``rows`` records, for training on a CPU."""

    def __init__(
        self,
        batches: int,
        rows: int,
        signature: Signature,
        layout: DocumentLayout | None = None,
        augmentation: Augmentation | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        size = signature.record.itemsize
        self.batches, self._rows = batches, rows
        #: Rows from one batch to the next.
        self._stride = rows if batches == 1 else aligned(rows, size)
        self._host = torch.empty((batches * self._stride, size), dtype=torch.uint8, pin_memory=pinned)
        #: uint8 ``[batches * stride, record]``, filled by the reading thread.
        self.records = self._host.numpy()
        self._row_numbers = np.empty((batches, self._stride), np.int64)
        self._inputs, self._tokens = len(signature.inputs), signature.task == "next token"
        self._fields = [
            record_fields(part[:rows], signature) for part in self._on_device(self._host).split(self._stride)
        ]
        self._layout, self._signature = layout, signature
        #: Shape of every batch's bounds, which lie at the beginning of its row of ``_bounds``; None without bounds.
        self._bounded: list[tuple[int, ...] | None] = [None] * batches
        if layout:
            shape = (batches, layout.pieces * layout.widest)
            self._host_bounds = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
            self._bounds = self._on_device(self._host_bounds)
        self._augmentation = augmentation
        if augmentation:
            size_of_all = (batches, rows, augmentation.width)
            self._host_parameters = torch.empty(size_of_all, dtype=torch.int32, pin_memory=pinned)
            self._parameters = self._on_device(self._host_parameters)

    def _on_device(self, host: Tensor) -> Tensor:
        """Return the memory that the batches' tensors view."""
        return host

    def row_numbers(self, plans: list[BatchPlan]) -> np.ndarray:
        """Return the split's row number (int64) for every position of the planned batches.

        Short batches are padded with their first row, if any: a model's results on a real row are finite, on zeros
        perhaps not.
        """
        for numbers, plan in zip(self._row_numbers, plans, strict=False):
            rows = plan.rows
            numbers[: len(rows)] = rows
            if len(rows) < self._stride:
                numbers[len(rows) :] = rows[0] if len(rows) else 0
        return self._row_numbers[: len(plans)].reshape(-1)

    def clear(self, plans: list[BatchPlan]) -> None:
        """Zero the batches that have no rows, because their content was not verified."""
        for index, plan in enumerate(plans):
            if not len(plan.rows):
                self.records[index * self._stride : (index + 1) * self._stride] = 0

    def find_documents(self, plans: list[BatchPlan]) -> None:
        """Find the bounds of documents, if they are asked for; rows of batches without rows are one document each."""
        if self._layout is None:
            return
        rows = self._layout.pieces * self._layout.rows
        for index, plan in enumerate(plans):
            bounds: np.ndarray | None = self._layout.whole_rows().numpy()
            if len(plan.rows):
                begin = index * self._stride
                (tokens, *_) = record_fields(self._host[begin : begin + rows], self._signature)
                bounds = self._layout.bounds(read_tokens(tokens.numpy())[0])
            self._bounded[index] = None if bounds is None else bounds.shape
            if bounds is not None:
                self._host_bounds[index, : bounds.size] = torch.from_numpy(bounds).flatten()

    def documents(self, index: int) -> Tensor | None:
        """Return the bounds of documents in batch ``index``, as in :class:`Batch`."""
        shape = self._bounded[index]
        return None if shape is None else self._bounds[index, : math.prod(shape)].view(shape)

    def draw(self, plans: list[BatchPlan]) -> None:
        """Draw the parameters of the augmentation, if there is one."""
        if self._augmentation:
            for parameters, plan in zip(self._host_parameters, plans, strict=False):
                parameters[: len(plan.rows)] = torch.from_numpy(self._augmentation.parameters(plan))

    def send(self, batches: int) -> None:
        """Copy the first ``batches`` batches to the device; called by the reading thread."""

    def augment(self, plans: list[BatchPlan]) -> None:
        """Augment the images on the device, but not padding; called by the reading thread."""
        if self._augmentation:
            for fields, parameters, plan in zip(self._fields, self._parameters, plans, strict=False):
                rows = len(plan.rows)
                if rows:
                    self._augmentation.apply(fields[self._augmentation.input][:rows], parameters[:rows])

    def tensors(self, index: int, rows: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """Return inputs, target and weight (None without weights) of the first ``rows`` records of batch ``index``."""
        columns = self._fields[index]
        if rows < self._rows:
            columns = tuple(field[:rows] for field in columns)
        inputs, (target, *weight) = columns[: self._inputs], columns[self._inputs :]
        if self._tokens:
            inputs, target = tuple(read_tokens(each)[0] for each in inputs), read_tokens(target)[1]
        return inputs, target, weight[0] if weight else None

    def release(self) -> None:
        """Allow reuse of the tensors; called by the consumer once it has enqueued all work on them."""


class DeviceBuffer(HostBuffer):
    """Buffer for batches in pinned host memory, with a copy on a GPU."""

    def __init__(
        self,
        batches: int,
        rows: int,
        signature: Signature,
        device: torch.device,
        layout: DocumentLayout | None = None,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._target = device
        self._copies: list[tuple[Tensor, Tensor]] = []
        super().__init__(batches, rows, signature, layout, augmentation, pinned=True)
        self._stream = torch.cuda.Stream(device)
        # Work on the consumer's stream may still use this memory for an earlier tensor that was freed.
        self._used = torch.cuda.current_stream(device).record_event()

    def _on_device(self, host: Tensor) -> Tensor:
        self._copies.append((torch.empty_like(host, device=self._target), host))
        return self._copies[-1][0]

    def send(self, batches: int) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            for device, host in self._copies:
                part = slice(len(host) * batches // self.batches)
                device[part].copy_(host[part], non_blocking=True)
        # The thread waits for the copy, so that the consumer need not and the host buffer can be reused.
        wait_for(self._stream)

    def augment(self, plans: list[BatchPlan]) -> None:
        with torch.cuda.stream(self._stream):
            super().augment(plans)
        wait_for(self._stream)

    def release(self) -> None:
        self._used = torch.cuda.current_stream(self._target).record_event()


def make_buffer(
    batches: int,
    rows: int,
    signature: Signature,
    device: torch.device,
    documents: DocumentLayout | None = None,
    augmentation: Augmentation | None = None,
) -> HostBuffer:
    if device.type == "cuda":
        return DeviceBuffer(batches, rows, signature, device, documents, augmentation)
    return HostBuffer(batches, rows, signature, documents, augmentation)


def aligned(rows: int, size: int) -> int:
    """Round ``rows`` up so that the next batch is aligned; records have ``size`` bytes."""
    step = ALIGNMENT // math.gcd(ALIGNMENT, size)
    return -(-rows // step) * step


def record_fields(records: Tensor, signature: Signature) -> tuple[Tensor, ...]:
    """Return views of records (uint8 ``[rows, record]``), one for every input and label."""
    views = []
    offsets = signature.record.fields
    assert offsets is not None
    for spec in (*signature.inputs, *signature.labels):
        dtype = getattr(torch, spec.dtype)
        start = offsets[spec.name][1]
        column = records[:, start : start + math.prod(spec.shape) * dtype.itemsize].view(dtype)
        views.append(column.unflatten(1, spec.shape) if spec.shape else column[:, 0])
    return tuple(views)
