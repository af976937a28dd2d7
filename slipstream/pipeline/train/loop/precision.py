"""Numerics of training: loss scaling and selection of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.pipeline.train.checkpoint.state import StateDict
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.optimizer import GradientCheck
from slipstream.shared.models.arithmetic import tf32_allowed

#: Defaults of torch's GradScaler.
FIRST_SCALE = 2.0**16
STEPS_TO_GROW = 2000
#: Outcomes of a step: weights updated; skipped; skipped, possibly because the loss scale was too large.
USED, SKIPPED, RESCALED = 0, 1, 2


@contextmanager
def kernels_configured(config: TrainingConfig) -> Iterator[None]:
    """Set deterministic and TF32 kernels as configured, and restore the former settings on exit.

    TF32 applies to both matmuls and convolutions. Enter the context before anything runs on a GPU.
    """
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Filling uninitialised memory costs time, and only helps to find reads of it.
    fill: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    allowed = cudnn.benchmark, fill.fill_uninitialized_memory
    if config.deterministic:
        # cuBLAS sums in a fixed order only with a workspace of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The benchmark selects the fastest algorithm per shape, which may differ between runs.
    cudnn.benchmark = not config.deterministic
    torch.use_deterministic_algorithms(config.deterministic)
    fill.fill_uninitialized_memory = False
    try:
        with tf32_allowed(config.tf32):
            yield
    finally:
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
        cudnn.benchmark, fill.fill_uninitialized_memory = allowed


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018) for fp16; with ``enabled`` False the scale is 1.

    Unlike torch's GradScaler it takes the check of the gradients from :class:`GradientCheck`, and never makes the host
    wait. Its state has GradScaler's keys.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.full((), FIRST_SCALE if enabled else 1.0, device=device)
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, factor: float) -> Tensor | float:
        """Return ``factor`` times the scale."""
        return self.scale * factor if self.enabled else factor

    def outcome(self, verdict: GradientCheck) -> Tensor:
        """Return the outcome of a step, a scalar: :data:`USED`, :data:`SKIPPED` or :data:`RESCALED`."""
        return verdict.skip * (SKIPPED + (self.scale > 1)) if self.enabled else verdict.skip

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients of ``parameters`` by the scale, in place."""
        if not self.enabled:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self.scale.double().reciprocal().float())

    @torch.no_grad()
    def update(self, verdict: GradientCheck) -> None:
        """Halve the scale after a skipped step; double it after :data:`STEPS_TO_GROW` used steps."""
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
