"""Mixed precision on devices that support it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def resolve_precision(wanted: str, device: torch.device) -> str:
    """``auto`` becomes bf16 where the GPU has it, fp16 on other GPUs and fp32 on a CPU."""
    if wanted != "auto":
        return wanted
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which forward passes run."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Loss scaling (Micikevicius et al. 2018), which is disabled unless ``precision`` is fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
