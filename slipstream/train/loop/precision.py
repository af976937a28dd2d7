"""The arithmetic of training: precision, loss scaling, and which kernels may be used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import UserError
from slipstream.train.checkpoint.state import StateDict
from slipstream.train.config import TrainingConfig
from slipstream.train.loop.optimizer import Verdict

#: As torch's GradScaler has them.
FIRST_SCALE = 2.0**16
STEPS_TO_GROW = 2000
#: What became of a step: its update was made; it was skipped; it was skipped, perhaps because the loss scale was too
#: large.
USED, SKIPPED, RESCALED = 0, 1, 2


@contextmanager
def kernels(config: TrainingConfig) -> Iterator[None]:
    """Allow only deterministic kernels, and TF32 for both matrices and convolutions or for neither, by the settings.

    Has to be entered before anything runs on a GPU. On leaving, what was allowed before is allowed again.
    """
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Filling memory that is never written costs time, and helps only to find reads of it.
    fill: Any = torch.utils.deterministic
    matrices, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    allowed = cudnn.allow_tf32, cudnn.benchmark, fill.fill_uninitialized_memory
    if config.deterministic:
        # cuBLAS sums in one order only if its workspace is of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        cudnn.benchmark = False
    torch.use_deterministic_algorithms(config.deterministic)
    fill.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    cudnn.allow_tf32 = config.tf32
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        torch.set_float32_matmul_precision(matrices)
        cudnn.allow_tf32, cudnn.benchmark, fill.fill_uninitialized_memory = allowed


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


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018) for fp16; disabled it multiplies by 1.

    Unlike torch's GradScaler it has no verdict of its own, which would be of this rank's gradients only, and never
    makes the host wait in a step. Its state is what GradScaler's is called.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.full((), FIRST_SCALE if enabled else 1.0, device=device)
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, factor: float) -> Tensor | float:
        """The factor times the scale."""
        return self.scale * factor if self.enabled else factor

    def outcome(self, verdict: Verdict) -> Tensor:
        """What became of a step, a scalar: :data:`USED`, :data:`SKIPPED` or :data:`RESCALED`."""
        return verdict.skip * (SKIPPED + (self.scale > 1)) if self.enabled else verdict.skip

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale."""
        if not self.enabled:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self.scale.double().reciprocal().float())

    @torch.no_grad()
    def update(self, verdict: Verdict) -> None:
        """Halve the scale after a skipped step, double it after so many steps that were not skipped."""
        if not self.enabled:
            return
        skip = verdict.skip.bool()
        self._steps.copy_(torch.where(skip, 0, self._steps + 1))
        grows = self._steps == STEPS_TO_GROW
        self.scale.copy_(torch.where(skip, self.scale / 2, torch.where(grows, self.scale * 2, self.scale)))
        self._steps.masked_fill_(grows, 0)

    def state_dict(self) -> StateDict:
        if not self.enabled:
            return {}
        return {"scale": self.scale.item(), "_growth_tracker": int(self._steps.item())}

    def load_state_dict(self, state: StateDict) -> None:
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._steps.fill_(state["_growth_tracker"])
