"""Weights in four bits: NF4 (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs").

A row is divided into blocks of 64 numbers. The scale of a block is its largest magnitude. A number is divided by the
scale and stored as the code of the nearest of 16 levels. The levels divide a normal distribution into equal
probabilities. A weight takes 4.5 bits, including its part of the scale.

Two plain tensors store a weight: ``codes``, uint8 ``[out, in / 2]`` with the first of two numbers in the high bits, and
``scales``, ``[out, in / 64]``: float32, stored as int32 of the same bits. So code that converts floating-point
parameters, as FSDP2 does before gathering in bf16, changes neither.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

#: Number of consecutive weights that share a scale.
BLOCK = 64
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
#: Lower bound of a scale as a divisor, for blocks of zeros or almost zeros.
SMALLEST = 1e-38


class QuantisedWeight(NamedTuple):
    """Codes and scales of a quantised weight."""

    codes: Tensor
    scales: Tensor


def quantise_weight(weight: Tensor) -> QuantisedWeight:
    """Quantise a weight ``[out, in]``, or some of its rows; ``in`` must be a multiple of :data:`BLOCK`."""
    blocks = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=2)
    scaled = (blocks * (1.0 / scales.clamp(min=SMALLEST)).unsqueeze(2)).clamp_(-1.0, 1.0)
    levels = torch.tensor(LEVELS, device=weight.device)
    nearest = torch.bucketize(scaled, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8).flatten(1)
    return QuantisedWeight((nearest[:, ::2] << 4) | nearest[:, 1::2], scales.view(torch.int32))


def dequantise_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight ``[out, in]``, computed in float32 and rounded once to ``dtype``."""
    traced = torch.compiler.is_compiling() or codes.is_meta or is_fake(codes)
    pairs = (pairs_of_levels if traced else kept_pairs)(codes.device)
    numbers = pairs.index_select(0, codes.flatten().int()).view(torch.float32).view(*scales.shape, BLOCK)
    return numbers.mul_(scales.view(torch.float32).unsqueeze(2)).flatten(1).to(dtype)


def pairs_of_levels(device: torch.device) -> Tensor:
    """Return a lookup table from a byte (two codes) to two float32 levels, int64 ``[256]``.

    Looking up pairs halves the number of lookups.
    """
    levels = torch.tensor(LEVELS, device=device)
    pairs = torch.stack([levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))], dim=1)
    return pairs.view(torch.int64).flatten()


@lru_cache(maxsize=8)
def kept_pairs(device: torch.device) -> Tensor:
    """Return the cached lookup table of a device; creating it makes the host wait."""
    with torch.inference_mode(False):
        return pairs_of_levels(device)


class QuantisedMatmul(torch.autograd.Function):
    """Matmul of ``[..., in]`` with a four-bit weight, ``[..., out]``.

    The backward pass dequantises again, so only ``codes`` and ``scales`` are saved. (FSDP2 may free them after the
    forward pass and gather them again.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return functional.linear(x, dequantise_weight(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        codes, scales = ctx.saved_tensors
        return grad @ dequantise_weight(codes, scales, grad.dtype), None, None
