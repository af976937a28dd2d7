"""Document boundaries in rows of token ids."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_mask(ids: Tensor, document_end: int) -> Tensor:
    """Return the attention mask, bool ``[batch, 1, length, length]``, of ids ``[batch, length]``.

    A position attends to itself and to earlier positions of its document. A document starts with the token
    ``document_end`` that ended the previous document.
    """
    document = (ids == document_end).long().cumsum(1)
    length = ids.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    return ((document.unsqueeze(2) == document.unsqueeze(1)) & before).unsqueeze(1)


def places_in_documents(ids: Tensor, document_end: int) -> Tensor:
    """Return every token's position in its document, int64, starting from 0, for ids ``[batch, length]``.

    With ``document_end`` -1 it is the position in the row. Given these positions, Hugging Face's models attend within
    documents only.
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    begins = torch.where(ids == document_end, places, 0)
    # A running maximum; ONNX has no ``cummax``.
    return places - torch.where(places <= places.unsqueeze(1), begins.unsqueeze(1), 0).amax(dim=2)
