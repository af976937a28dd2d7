"""Triton kernels of the cross-entropy of tokens, see :mod:`slipstream.pipeline.train.loop.fused_loss`.

``row`` counts tokens. A row of logits is ``stride`` elements after the one before, and read in blocks. Numbers are
computed in float32. As in torch, a row with a NaN or positive infinity has the loss and the gradient NaN, and logits of
negative infinity have no probability.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def losses_of_tokens(  # noqa: PLR0913 - a kernel takes no objects
    logits: tl.tensor,
    target: tl.tensor,
    losses: tl.tensor,
    sums: tl.tensor,
    smoothing: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the loss of a token, and the logarithm of its sum of exponentials, in one pass over its logits."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    # A maximum and a sum for every lane, so that a block needs no exchange between threads.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    scaled = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + places < vocabulary
        x = tl.load(logits + row * stride + start + places, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        scaled = scaled * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = higher
        total += tl.where(inside, x, 0.0)
    highest = tl.max(largest, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    lanes = tl.where(largest == float("-inf"), 0.0, scaled * tl.exp(largest - shift))
    # A lane's NaN is in its sum, which the maximum may have skipped.
    lanes = tl.where(scaled == scaled, lanes, scaled)
    log_sum = shift + tl.log(tl.sum(lanes, 0))
    right = tl.load(logits + row * stride + tl.load(target + row)).to(tl.float32)
    loss = (1.0 - smoothing) * (log_sum - right)
    if smoothing != 0.0:
        loss += smoothing * (log_sum - tl.sum(total, 0) / vocabulary)
    tl.store(losses + row, loss)
    tl.store(sums + row, log_sum)


@triton.jit
def gradients_of_tokens(  # noqa: PLR0913
    logits: tl.tensor,
    target: tl.tensor,
    upstream: tl.tensor,
    sums: tl.tensor,
    smoothing: tl.tensor,
    gradient: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradient of a token's logits, times that of its loss, in one pass over them."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    log_sum, scale, label = tl.load(sums + row), tl.load(upstream + row), tl.load(target + row)
    spread = smoothing / vocabulary
    for start in range(0, vocabulary, BLOCK):
        here = start + places
        inside = here < vocabulary
        x = tl.load(logits + row * stride + here, mask=inside, other=float("-inf")).to(tl.float32)
        slope = tl.exp(x - log_sum) - spread - tl.where(here == label, 1.0 - smoothing, 0.0)
        tl.store(gradient + row * stride + here, (slope * scale).to(gradient.dtype.element_ty), mask=inside)
