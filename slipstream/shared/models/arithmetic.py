"""Floating-point precision of training and of its timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.shared.errors import UserError


@dataclass(frozen=True)
class Arithmetic:
    """Settings ``training.precision`` and ``training.tf32``."""

    precision: str = "auto"
    tf32: bool = False


class DeviceCapability(NamedTuple):
    """Whether a rank's device is a GPU, and whether it supports bfloat16 without emulation."""

    gpu: bool
    bf16: bool


def device_capability(device: torch.device) -> DeviceCapability:
    gpu = device.type == "cuda"
    return DeviceCapability(gpu, gpu and torch.cuda.is_bf16_supported(including_emulation=False))


def common_precision(wanted: str, ranks: Sequence[DeviceCapability]) -> str:
    """Resolve the precision ``wanted`` for all ranks, which must agree since their results are summed.

    "auto" gives bf16 if every GPU supports it, fp16 if some do not, and fp32 if not all ranks have a GPU. Raises
    ``UserError`` like :func:`choose_precision`.
    """
    gpus = [rank for rank in ranks if rank.gpu]
    mixed = wanted == "auto" and len(gpus) < len(ranks)
    return choose_precision(wanted, gpu=bool(gpus) and not mixed, bf16=all(gpu.bf16 for gpu in gpus))


def resolve_precision(wanted: str, device: torch.device) -> str:
    """Resolve the precision for one device; see :func:`choose_precision`."""
    return common_precision(wanted, [device_capability(device)])


def choose_precision(wanted: str, *, gpu: bool, bf16: bool) -> str:
    """Resolve "auto" to bf16 on GPUs that support it (``bf16``), fp16 on other GPUs and fp32 on a CPU.

    Other values of ``wanted`` are returned; a CPU supports all. Raises ``UserError`` for bf16 on a GPU without support.
    """
    if wanted == "bf16" and gpu and not bf16:
        raise UserError(
            "training.precision: bf16 takes a GPU of NVIDIA's compute capability 8.0 (Ampere) or later, or one of AMD; "
            "expected auto, fp16 or fp32"
        )
    if wanted != "auto":
        return wanted
    return ("bf16" if bf16 else "fp16") if gpu else "fp32"


def autocast_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context for forward passes in ``precision``; it does nothing in fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def autocast_type(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast computes matmuls of ``x``."""
    kind = x.device.type
    cast = kind != "meta" and torch.is_autocast_enabled(kind)  # "meta" has no autocast
    return torch.get_autocast_dtype(kind) if cast else x.dtype


@contextmanager
def tf32_allowed(tf32: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matmuls and convolutions; restore the previous setting on exit."""
    matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matrices)
        torch.backends.cudnn.allow_tf32 = convolutions
