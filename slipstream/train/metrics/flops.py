"""The floating-point operations that a model needs: those of products of matrices, convolutions and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

#: The kernels of attention. torch does not count the CPU's, and counts with the others what they compute again.
ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    return 2 * sdpa_flop_count(query, key, value)


def flop_counter() -> FlopCounterMode:
    """A context that counts; ``get_total_flops()`` tells."""
    kernels = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in ATTENTION}
    backwards = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward") for name in ATTENTION}
    formulas: dict[Any, Any] = dict.fromkeys(kernels.values(), forward) | dict.fromkeys(backwards.values(), backward)
    return FlopCounterMode(display=False, custom_mapping=formulas)
