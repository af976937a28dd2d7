"""CUDA's fused operators for traces on fake CPU tensors.

A torch build without CUDA has no gradients of fake CUDA tensors, so traces use fake CPU tensors. On a CPU, torch
decomposes RMSNorm, which keeps six intermediate tensors, and uses an attention kernel with other limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import _scoped_library
from torch.nn import functional

from slipstream.shared.models.arithmetic import autocast_type

NORM = "_fused_rms_norm"
HALF = (torch.bfloat16, torch.float16)
CHOICE_OF_CPU = functional.scaled_dot_product_attention
#: Flash attention supports heads of at most this size.
LARGEST_HEAD = 256
#: Fused kernels take head sizes that are multiples of this number; torch pads others.
ALIGNED = 8


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Let fake CPU tensors run CUDA's ``_fused_rms_norm`` and attention kernels within the block."""
    with _scoped_library("aten", "IMPL") as library:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{NORM}", "CPU"):
            # An operator with a CPU kernel is not decomposed; fake tensors never reach the kernel.
            library.impl(NORM, without_values, "CPU")
        # Not by a TorchFunctionMode: a block that is recomputed in the backward pass would run without it.
        functional.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = CHOICE_OF_CPU


def without_values(*_: object) -> None:
    raise RuntimeError(f"{NORM} is only traced, on fake tensors")


def attention(  # noqa: PLR0913 - the signature of torch
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the outputs of the kernel that CUDA would use for these tensors.

    It is flash attention, else the memory-efficient kernel, else torch's choice on the CPU. As in
    :mod:`slipstream.shared.models.transformer`, heads are repeated for the memory-efficient kernel.
    """
    query, key, value = (x.to(autocast_type(x)) for x in (query, key, value))
    sizes = {x.shape[-1] for x in (query, key, value)}
    fused = query.ndim == 4 and len(sizes) == 1 and max(sizes) % ALIGNED == 0
    if fused and query.dtype in HALF and attn_mask is None and max(sizes) <= LARGEST_HEAD:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if not fused or query.dtype not in (*HALF, torch.float32):
        return CHOICE_OF_CPU(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(query.dtype)
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(bias).masked_fill_(attn_mask.logical_not(), float("-inf"))
        bias = bias.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
