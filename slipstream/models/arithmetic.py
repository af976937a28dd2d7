"""The type that a training computes in, for what trains and for what times training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import UserError


@dataclass(frozen=True)
class Arithmetic:
    """The settings ``training.precision`` and ``training.tf32``."""

    precision: str = "auto"
    tf32: bool = False


class Ability(NamedTuple):
    """What a rank computes on: whether that is a GPU, and whether it computes in bfloat16 without emulation."""

    gpu: bool
    bf16: bool


def ability_of(device: torch.device) -> Ability:
    gpu = device.type == "cuda"
    return Ability(gpu, gpu and torch.cuda.is_bf16_supported(including_emulation=False))


def common_precision(wanted: str, ranks: Sequence[Ability]) -> str:
    """:func:`precision_of` all of these together: one for all, since what they compute is added up. "auto" is bf16 if
    every GPU has it, fp16 with older ones among them, and fp32 if not all are GPUs. Raises ``UserError`` as that does.
    """
    gpus = [rank for rank in ranks if rank.gpu]
    mixed = wanted == "auto" and len(gpus) < len(ranks)
    return precision_of(wanted, gpu=bool(gpus) and not mixed, bf16=all(gpu.bf16 for gpu in gpus))


def resolve_precision(wanted: str, device: torch.device) -> str:
    """:func:`precision_of` that device."""
    return common_precision(wanted, [ability_of(device)])


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


def autocast_type(x: Tensor) -> torch.dtype:
    """The type that products of ``x`` are computed in."""
    kind = x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # of "meta" there is none
    return torch.get_autocast_dtype(kind) if cast else x.dtype


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
