"""The type that a training computes in, for what trains and for what times training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from slipstream.errors import UserError


@dataclass(frozen=True)
class Arithmetic:
    """The settings ``training.precision`` and ``training.tf32``."""

    precision: str = "auto"
    tf32: bool = False


def resolve_precision(wanted: str, device: torch.device) -> str:
    """:func:`precision_of` that device."""
    gpu = device.type == "cuda"
    return precision_of(wanted, gpu=gpu, bf16=gpu and torch.cuda.is_bf16_supported(including_emulation=False))


def precision_of(wanted: str, *, gpu: bool, bf16: bool) -> str:
    """``auto`` becomes bf16 where the GPU has it (``bf16``), fp16 on other GPUs and fp32 on a CPU, which computes in
    any of them. Raises ``UserError`` if a GPU shall do what it cannot."""
    if wanted == "bf16" and gpu and not bf16:
        raise UserError(
            "training.precision: bf16 takes a GPU of NVIDIA's compute capability 8.0 (Ampere) or later, or one of AMD; "
            "expected auto, fp16 or fp32"
        )
    if wanted != "auto":
        return wanted
    return ("bf16" if bf16 else "fp16") if gpu else "fp32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which forward passes run."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


@contextmanager
def rounding(tf32: bool) -> Iterator[None]:
    """Allow TF32 for both matrices and convolutions or for neither; on leaving, what was allowed before is again."""
    matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matrices)
        torch.backends.cudnn.allow_tf32 = convolutions
