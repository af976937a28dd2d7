"""Rotary positions (Su et al. 2021, "RoFormer"), plain and with Llama 3's scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.models.transformer.config import TransformerConfig


def frequencies(config: TransformerConfig, device: torch.device) -> Tensor:
    """Radians per token of each pair of a head's numbers: float32 ``[head size / 2]``."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling.rope_type == "default":
        return plain
    # Long waves are stretched by the factor, short ones left alone; in between it is interpolated (Llama 3.1).
    waves = scaling.original_max_position_embeddings / (2 * math.pi / plain)
    mix = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    mix = mix.clamp(0, 1)
    return (1 - mix) * plain / scaling.factor + mix * plain


def tables(config: TransformerConfig, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles at positions 0 to ``length``: each ``[length, 1, head size]``."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies(config, device))
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of numbers ``(i, i + size / 2)`` of the heads ``[batch, length, heads, size]`` by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
