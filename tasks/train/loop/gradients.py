"""One norm, one verdict: both are of the gradient of the whole model, and equal on all ranks.

A norm that is not finite says that some gradient is not, or that a loss was not, since the step multiplies a loss that
is no number into its gradient; summed over the ranks, it reaches all of them. So the verdict needs no collective of its
own, and stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Verdict(NamedTuple):
    """Scalars on the gradient's device: its L2 norm, and float32 1 if that is not finite, else 0 (what fused optimisers
    call ``found_inf``)."""

    norm: Tensor
    skip: Tensor


def judge(parameters: Iterable[Tensor]) -> Verdict:
    """The norm of the gradients of ``parameters``, which all ranks hold alike, and whether it can be used."""
    return verdict_of(get_total_norm([p.grad for p in parameters if p.grad is not None]))


def verdict_of(norm: Tensor) -> Verdict:
    return Verdict(norm, torch.isfinite(norm).logical_not().to(torch.float32))


def clip(parameters: Iterable[Tensor], verdict: Verdict, largest: float) -> None:
    """Scale the gradients down to the norm ``largest`` if theirs is larger."""
    clip_grads_with_norm_(parameters, largest, verdict.norm)


def update(optimizer: torch.optim.Optimizer, verdict: Verdict) -> None:
    """Run the optimiser's step unless the verdict is to skip it; a fused optimiser decides that on the device."""
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = verdict.skip  # type: ignore[attr-defined]  # as GradScaler hands it over
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not verdict.skip.item():  # the optimiser of a checkpoint from before: the host has to wait
        optimizer.step()
