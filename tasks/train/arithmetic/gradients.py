"""One norm, one verdict: both are of the gradient of the whole model, and equal on all ranks.

A norm that is not finite says that some gradient is not, or that a loss was not, since the step multiplies a loss that
is no number into its gradient; summed over the ranks, it reaches all of them. So the verdict needs no collective of its
own, and stays on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """Scalars on the gradient's device: its L2 norm, and float32 1 if that is not finite, else 0 (what fused optimisers
    call ``found_inf``)."""

    norm: Tensor
    skip: Tensor


def judge(norm: Tensor) -> Verdict:
    """Whether the gradient of this norm can be used."""
    return Verdict(norm, torch.isfinite(norm).logical_not().to(torch.float32))


def known(verdict: Verdict) -> bool:
    """Whether the host need not wait to know the verdict."""
    return verdict.skip.device.type == "cpu"


def update(optimizer: torch.optim.Optimizer, verdict: Verdict) -> None:
    """Run the optimiser's step unless the verdict is to skip it; a fused optimiser decides that on the device, unless
    the host knows already: counting the step back costs more than the decision."""
    if not known(verdict) and all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = verdict.skip  # type: ignore[attr-defined]  # as GradScaler hands it over
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not verdict.skip.item():  # the optimiser of a checkpoint from before: the host has to wait
        optimizer.step()
