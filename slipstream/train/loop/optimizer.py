"""The update of a step: learning rate, one verdict on the gradient, AdamW, and an average of the weights.

The norm and the verdict are of the gradient of the whole model, and equal on all ranks. A norm that is not finite says
that some gradient is not, or that a loss was not, since the step multiplies a loss that is not finite into its
gradient; summed over the ranks, it reaches all of them. So the verdict needs no collective of its own, and stays on the
device. On a CPU the host may as well look: arithmetic on scalars takes it longer than that.

The learning rate is a pure function of the step, so that checkpoints need not hold any state of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.func import functional_call

from slipstream.train.checkpoint.state import StateDict
from slipstream.train.config import TrainingConfig

#: Verdicts that the host knows.
USE, SKIP = torch.zeros(()), torch.ones(())
#: What torch adds to a norm before it divides by it, and more than what its rounding can change.
EPSILON, ROUNDING = 1e-6, 1e-6
#: The decay after t steps is at most (1 + t) / (10 + t), so that the initial weights are soon forgotten (as in
#: TensorFlow's ExponentialMovingAverage).
EARLY = 10.0


class Verdict(NamedTuple):
    """Scalars on the gradient's device: its L2 norm, and float32 1 if that is not finite, else 0 (what fused optimisers
    call ``found_inf``)."""

    norm: Tensor
    skip: Tensor


def known_to_host(tensor: Tensor) -> bool:
    """Whether the host need not wait to read it. One that is only traced has no value."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def factor_or_nan(factor: float | Tensor, loss: Tensor) -> float | Tensor:
    """The factor of a loss, or NaN if that loss is not finite, though its own derivative may be."""
    if known_to_host(loss) and not isinstance(factor, Tensor):
        return factor if math.isfinite(loss) else math.nan
    return loss * 0 + factor


def judge(norm: Tensor) -> Verdict:
    """Whether the gradient of this norm can be used."""
    if known_to_host(norm):
        return Verdict(norm, USE if math.isfinite(norm) else SKIP)
    # What is not finite gives NaN when it is taken from itself; ``isfinite`` launches three times as many kernels.
    return Verdict(norm, (norm - norm).ne_(0).float())


def may_exceed(norm: Tensor, largest: float) -> bool:
    """Whether a gradient of this norm has to be scaled down to the norm ``largest``, or that is not known."""
    return not (known_to_host(norm) and (norm.item() + EPSILON) * (1 + ROUNDING) < largest)


def update(optimizer: torch.optim.Optimizer, verdict: Verdict) -> None:
    """Run the optimiser's step unless the verdict is to skip it; a fused optimiser decides that on the device, unless
    the host knows already: counting the step back costs more than the decision."""
    if not known_to_host(verdict.skip) and all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = verdict.skip  # type: ignore[attr-defined]  # as GradScaler hands it over
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not verdict.skip.item():  # on a device: the optimiser of a checkpoint from before, for which the host waits
        optimizer.step()


def learning_rate(step: int, total: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the share ``warmup`` of all steps, then a half cosine to zero (Loshchilov, Hutter 2017).

    ``step`` counts from 0; the rates of the first and the last step are above 0.
    """
    rising = math.ceil(warmup * total)
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


class AveragedWeights:
    """The average of a model's parameters over the steps (Polyak, Juditsky 1992, with exponential weights). Buffers and
    frozen parameters are the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained = list(trained.values())
        self.weights = {name: p.detach().clone() for name, p in trained.items()}

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Take in the weights after the ``step``-th step, counted from 0, unless ``skip`` (a float32 scalar) is 1.

        A step that is known to be skipped does not touch the averages: a checkpoint may be copying them, and only the
        optimiser's step waits for that.
        """
        share = 1 - min(self._decay, (1 + step) / (EARLY + step))
        averages = list(self.weights.values())
        weights: list[Tensor] = list(self._trained)
        if not known_to_host(skip):
            # ``_foreach_lerp_`` takes no share for all from the device: with one for each it runs tensor by tensor.
            differences = torch._foreach_sub(weights, averages)
            torch._foreach_mul_(differences, share * (1 - skip))
            torch._foreach_add_(averages, differences)
        elif not skip:
            torch._foreach_lerp_(averages, weights, share)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The model's outputs with the averaged weights."""
        return functional_call(self._model, self.weights, inputs)

    def state_dict(self) -> StateDict:
        return dict(self.weights)

    def load_state_dict(self, state: StateDict) -> None:
        for name, tensor in state.items():
            self.weights[name].copy_(tensor)


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter 2019) without weight decay for biases and normalisation layers; fused into one kernel,
    unless a parameter has a type that has none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.is_floating_point() for p in trained)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.learning_rate, fused=fused)
