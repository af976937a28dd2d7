"""``varlen_attn`` on a CPU, document by document: torch has its operators for GPUs only."""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def by_document(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """Causal attention of every document by itself; the tensors are ``[tokens, heads, size]``."""
    mixed = []
    for begin, end in pairwise(bounds.tolist()):
        q, k, v = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed.append(found[0].transpose(0, 1))
    return torch.cat(mixed)


def forward(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, longest, _, causal, *_ = rest
    assert causal and longest >= bounds.diff().max(), "the kernel reads no further than the longest document"
    CALLS.append(bounds.clone())
    found = by_document(query, key, value, bounds)
    return found.contiguous(), query.new_empty(query.shape[1], len(query), dtype=torch.float32), torch.empty(2)


def backward(given: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients by hand, because autograd is off within an operator."""
    bounds, shared, scale = rest[2], query.shape[1] // key.shape[1], query.shape[2] ** -0.5
    found = [torch.zeros_like(x) for x in (query, key, value)]
    for begin, end in pairwise(bounds.tolist()):
        # [heads, tokens, size], every key and value head repeated for its query heads
        q, k, v, g = (
            x[begin:end].transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 0)
            for x in (query, key, value, given)
        )
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        chances = (q @ k.mT * scale).masked_fill(later, float("-inf")).softmax(2)
        at_chances = g @ v.mT
        at_scores = chances * (at_chances - (at_chances * chances).sum(2, keepdim=True)) * scale
        for whole, part in zip(found, (at_scores @ k, at_scores.mT @ q, chances.mT @ g), strict=True):
            joined = part if whole is found[0] else part.unflatten(0, (-1, shared)).sum(1)
            whole[begin:end] = joined.transpose(0, 1)
    return tuple(found)


#: Bounds of the calls since the last :func:`documents_on_cpu`.
CALLS: list[Tensor] = []


@cache
def register() -> None:
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def documents_on_cpu() -> list[Tensor]:
    """Let CPU tensors run ``varlen_attn``; return the list to which every call adds its bounds."""
    register()
    CALLS.clear()
    return CALLS
