"""What rows of tokens say besides the ids: which are learned, and where documents begin."""

from __future__ import annotations

import torch
from torch import Tensor


def ids_of(tokens: Tensor) -> Tensor:
    """The ids, int64, of stored tokens, of which those that are not learned are -1 - id."""
    tokens = tokens.long()
    return torch.where(tokens < 0, -1 - tokens, tokens)


def attended(ids: Tensor, document_end: int) -> Tensor:
    """Which places each place attends to, bool ``[batch, 1, length, length]``, of ids ``[batch, length]``: those of its
    own document up to itself. A document begins with the token ``document_end`` that ended the one before."""
    document = (ids == document_end).long().cumsum(1)
    length = ids.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    return ((document.unsqueeze(2) == document.unsqueeze(1)) & before).unsqueeze(1)


def places_in_documents(ids: Tensor, document_end: int) -> Tensor:
    """Of ids ``[batch, length]`` the place of each in its document, int64 of the same shape, from 0 on; in its row if
    ``document_end`` is -1. transformers' models attend to documents alone if they are given these as positions."""
    places = torch.arange(ids.shape[1], device=ids.device)
    begins = torch.where(ids == document_end, places, 0)
    # The largest up to each place; ONNX has no ``cummax``.
    return places - torch.where(places <= places.unsqueeze(1), begins.unsqueeze(1), 0).amax(dim=2)
