"""Cross-entropy of tokens on a GPU by two Triton kernels, which move the least bytes.

The forward pass reads the logits once and keeps two numbers a token. The backward pass reads them again and writes the
gradient. Every program computes a token by itself, so equal inputs give equal bits. The logits are not overwritten,
because a pipeline schedule may run backward twice.

torch sees operators, so traces without a GPU count their memory; only their calls import Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

#: Largest number of logits that a program holds at once.
LARGEST_BLOCK = 4096


def fused_token_losses(logits: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    """Return the losses of :func:`.token_losses`, for logits of at most 32 bits."""
    losses, _ = forward(logits.contiguous(), target, label_smoothing)
    return losses


@custom_op("slipstream::token_losses", mutates_args=())
def forward(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the losses, and the logarithms of the sums of exponentials, float32 ``[tokens]`` each."""
    from slipstream.pipeline.train.loop.loss_kernels import losses_of_tokens

    losses, sums = empty_results(logits, target, smoothing)
    launch(losses_of_tokens, logits, target, losses, sums, smoothing)
    return losses, sums


@custom_op("slipstream::token_losses_backward", mutates_args=())
def backward(upstream: Tensor, logits: Tensor, target: Tensor, sums: Tensor, smoothing: float) -> Tensor:
    """Return the gradient of the logits for the gradients ``upstream`` of the losses."""
    from slipstream.pipeline.train.loop.loss_kernels import gradients_of_tokens

    gradient = torch.empty_like(logits)
    launch(gradients_of_tokens, logits, target, upstream.contiguous(), sums, smoothing, gradient)
    return gradient


@forward.register_fake
def empty_results(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    return losses, torch.empty_like(losses)


@backward.register_fake
def empty_gradient(upstream: Tensor, logits: Tensor, target: Tensor, sums: Tensor, smoothing: float) -> Tensor:
    return torch.empty_like(logits)


def launch(kernel: Any, logits: Tensor, target: Tensor, *more: Any) -> None:
    """Run a program of ``kernel`` for every token."""
    tokens, vocabulary = logits.shape
    block = min(LARGEST_BLOCK, 1 << max(4, (vocabulary - 1).bit_length()))
    warps = max(1, min(8, block // 512))
    if tokens:
        kernel[(tokens,)](logits, target, *more, vocabulary, logits.stride(0), BLOCK=block, num_warps=warps)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.smoothing = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, target, output[1])


def differentiate(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    return backward(upstream, *ctx.saved_tensors, ctx.smoothing), None, None


forward.register_autograd(differentiate, setup_context=keep)
