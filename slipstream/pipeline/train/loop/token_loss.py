"""Chunked cross-entropy of logits over a vocabulary.

The logits of a language model are the largest tensor of its step: 1 GiB in bf16 for 4 rows of 4,096 tokens and a
vocabulary of 32,000. Their softmax must be in float32; it is computed in chunks, so that it never exists as a whole.
The gradient is computed in the same pass, as in Hsu et al. 2024 ("Liger Kernel: Efficient Triton Kernels for LLM
Training").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

#: Maximum elements of a chunk: 64 MiB in float32, enough to keep a device busy.
PIECE = 1 << 24


def token_losses(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of every token, ``[tokens]``, in float32 (float64 for float64 logits).

    ``logits`` are ``[tokens, vocabulary]`` of any precision, ``target`` is int64 ``[tokens]``. ``label_smoothing`` is
    the fraction of every label that is spread over the whole vocabulary.
    """
    return TokenLosses.apply(logits, target, label_smoothing)


class TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        precision = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(len(logits), dtype=precision, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        rows = max(1, PIECE // logits.shape[1])
        for first in range(0, len(logits), rows):
            piece = slice(first, first + rows)
            labels = target[piece].unsqueeze(1)
            chances = functional.log_softmax(logits[piece], dim=1, dtype=precision)
            losses[piece] = -(1 - smoothing) * chances.gather(1, labels).squeeze(1)
            if smoothing:
                losses[piece] -= smoothing * chances.mean(dim=1)
            if gradient is not None:
                slope = chances.exp_().sub_(smoothing / logits.shape[1])
                # In one dimension: for two, some versions of torch copy strides from memory that is not pinned.
                places = torch.arange(len(labels), device=labels.device) * slope.shape[1] + labels.squeeze(1)
                slope.view(-1).scatter_add_(0, places, torch.full_like(places, smoothing - 1, dtype=precision))
                gradient[piece] = slope
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # ``out`` makes torch multiply in float32 and round once, without a float32 tensor of this size. The gradient
        # is kept, because a pipeline schedule may run backward twice.
        return torch.mul(gradient, upstream.unsqueeze(1), out=torch.empty_like(gradient)), None, None
