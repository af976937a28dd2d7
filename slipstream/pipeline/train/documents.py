"""Bounds of documents in a batch, for attention kernels that take them instead of a mask.

The loader finds them on the host, where it has just read the tokens. A micro-batch's rows lie behind one another as one
row of tokens, and its bounds are the offsets at which its documents start, followed by the number of its tokens. They
are padded with empty documents to a power of two, so that a training has few shapes. The backward pass takes scratch
for every document, also for an empty one, so the padding is as short as that allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.plan import model_plan

#: Largest number of documents in a row; a batch that has more is trained with a mask.
MOST_DOCUMENTS = 64


@dataclass(frozen=True)
class DocumentLayout:
    """Micro-batches whose documents are found: ``pieces`` of ``rows`` rows each, of ``length`` tokens.

    A document starts with the token ``start``.
    """

    start: int
    length: int
    rows: int
    pieces: int

    @property
    def widest(self) -> int:
        """Largest number of bounds of a micro-batch."""
        return padded_documents(MOST_DOCUMENTS * self.rows, self.rows) + 1

    def bounds(self, ids: np.ndarray) -> np.ndarray | None:
        """Return the bounds, int32 ``[pieces, documents + 1]``, of token ids ``[pieces * rows, length]``.

        Returns None if a row has more than :data:`MOST_DOCUMENTS` documents.
        """
        starts = ids == self.start
        starts[:, 0] = True  # A row that starts in the middle of a document does not see its beginning.
        if starts.sum(1).max() > MOST_DOCUMENTS:
            return None
        found = [np.flatnonzero(piece) for piece in np.split(starts.reshape(-1), self.pieces)]
        size = padded_documents(max(map(len, found)), self.rows)
        bounds = np.full((self.pieces, size + 1), self.rows * self.length, np.int32)
        for row, offsets in zip(bounds, found, strict=True):
            row[: len(offsets)] = offsets
        return bounds

    def whole_rows(self, documents: int = 1) -> Tensor:
        """Return the bounds of rows of ``documents`` documents of equal length."""
        count = documents * self.rows
        bounds = torch.full((self.pieces, padded_documents(count, self.rows) + 1), self.rows * self.length)
        bounds[:, :count] = torch.arange(count) * self.length // documents
        return bounds.int()


def padded_documents(count: int, rows: int) -> int:
    """Return the number of documents, empty ones included, of a micro-batch with ``count`` documents."""
    return 1 << (max(count, 2 * rows) - 1).bit_length()


def kernel_takes_documents(device: torch.device, precision: str) -> bool:
    """Return True if ``device`` has flash attention, the only kernel that takes bounds."""
    if device.type != "cuda" or precision == "fp32":
        return False
    return torch.cuda.get_device_properties(device).major >= 8


def document_layout(model: Predictor, rows: int, pieces: int, *, kernel: bool) -> DocumentLayout | None:
    """Return the layout of documents in batches of ``pieces`` times ``rows`` rows; None if a mask separates them.

    ``kernel`` comes from :func:`kernel_takes_documents`.
    """
    plan, start = model_plan(model.network), model.signature.document_start
    if not kernel or plan is None or not plan.takes_documents or start < 0 or not rows:
        return None
    return DocumentLayout(start, plan.sequence, rows, pieces)
