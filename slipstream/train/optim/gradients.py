"""One norm, one verdict: both are of the gradient of the whole model, and equal on all ranks.

A norm that is not finite says that some gradient is not, or that a loss was not, since the step multiplies a loss that
is not finite into its gradient; summed over the ranks, it reaches all of them. So the verdict needs no collective of
its own, and stays on the device. On a CPU the host may as well look: arithmetic on scalars takes it longer than that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: Verdicts that the host knows.
USE, SKIP = torch.zeros(()), torch.ones(())
#: What torch adds to a norm before it divides by it, and more than what its rounding can change.
EPSILON, ROUNDING = 1e-6, 1e-6


class Verdict(NamedTuple):
    """Scalars on the gradient's device: its L2 norm, and float32 1 if that is not finite, else 0 (what fused optimisers
    call ``found_inf``)."""

    norm: Tensor
    skip: Tensor


def known(tensor: Tensor) -> bool:
    """Whether the host need not wait to read it."""
    return tensor.device.type == "cpu"


def factor_unless_spoilt(factor: float | Tensor, loss: Tensor) -> float | Tensor:
    """The factor of a loss, or NaN if that loss is not finite, though its own derivative may be."""
    if known(loss) and not isinstance(factor, Tensor):
        return factor if math.isfinite(loss) else math.nan
    return loss * 0 + factor


def judge(norm: Tensor) -> Verdict:
    """Whether the gradient of this norm can be used."""
    if known(norm):
        return Verdict(norm, USE if math.isfinite(norm) else SKIP)
    # What is not finite gives NaN when it is taken from itself; ``isfinite`` launches three times as many kernels.
    return Verdict(norm, (norm - norm).ne_(0).float())


def may_exceed(norm: Tensor, largest: float) -> bool:
    """Whether a gradient of this norm has to be scaled down to the norm ``largest``, or that is not known."""
    return not (known(norm) and (norm.item() + EPSILON) * (1 + ROUNDING) < largest)


def update(optimizer: torch.optim.Optimizer, verdict: Verdict) -> None:
    """Run the optimiser's step unless the verdict is to skip it; a fused optimiser decides that on the device, unless
    the host knows already: counting the step back costs more than the decision."""
    if not known(verdict.skip) and all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = verdict.skip  # type: ignore[attr-defined]  # as GradScaler hands it over
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not verdict.skip.item():  # on a device: the optimiser of a checkpoint from before, for which the host waits
        optimizer.step()
