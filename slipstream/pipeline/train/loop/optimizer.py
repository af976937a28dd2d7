"""Update of a step: learning rate, check of the gradient, AdamW or SGD, averaged weights.

The learning rate is a pure function of the step, so checkpoints need not hold it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from slipstream.pipeline.train.checkpoint.staging import local_tensor
from slipstream.pipeline.train.checkpoint.state import StateDict
from slipstream.pipeline.train.config import TrainingConfig

#: Values of :attr:`GradientCheck.skip` on the CPU.
USE, SKIP = torch.zeros(()), torch.ones(())
#: Number that torch's clipping adds to a norm before dividing by it, and an upper bound of the relative rounding error.
EPSILON, ROUNDING = 1e-6, 1e-6
#: Constant of the EMA's warm-up: the decay after t steps is at most (1 + t) / (10 + t), so that the initial weights
#: fade soon (as in TensorFlow's ExponentialMovingAverage).
EARLY = 10.0


class GradientCheck(NamedTuple):
    """Gradient norm and whether to skip the step, as scalars on the gradient's device.

    ``norm`` is the L2 norm; ``skip`` is float32 1 if the norm is not finite, else 0 (``found_inf`` of fused
    optimisers).
    """

    norm: Tensor
    skip: Tensor


def known_to_host(tensor: Tensor) -> bool:
    """Return True if the host can read the value without waiting for a device.

    Fake tensors have no value.
    """
    return tensor.device.type == "cpu" and not is_fake(tensor)


def factor_or_nan(factor: float | Tensor, loss: Tensor) -> float | Tensor:
    """Return ``factor``, by which a loss is multiplied, or NaN if the loss is not finite.

    NaN makes the gradient non-finite, even if the derivative of the non-finite loss is finite.
    """
    if known_to_host(loss) and not isinstance(factor, Tensor):
        return factor if math.isfinite(loss) else math.nan
    return loss * 0 + factor


# Norm and check cover the whole model, and are equal on all ranks. The norm is non-finite if any gradient or loss is:
# the step multiplies a non-finite loss into its gradient, and the sum over the ranks spreads it. So the check needs no
# further collective, and stays on the device. On a CPU the host reads the norm, because tensor arithmetic on scalars
# would take longer.
def check_gradient(norm: Tensor) -> GradientCheck:
    """Return the :class:`GradientCheck` for a gradient norm: skip the step if the norm is not finite."""
    if known_to_host(norm):
        return GradientCheck(norm, USE if math.isfinite(norm) else SKIP)
    # A non-finite number minus itself is NaN; ``isfinite`` launches three times as many kernels.
    return GradientCheck(norm, (norm - norm).ne_(0).float())


def may_exceed(norm: Tensor, largest: float) -> bool:
    """Return True if the norm exceeds ``largest``, or if the host cannot read it."""
    return not (known_to_host(norm) and (norm.item() + EPSILON) * (1 + ROUNDING) < largest)


def clipping_divisor(norm: Tensor, largest: float) -> Tensor:
    """Return the number to divide a gradient of norm ``norm`` by, so that its norm is at most ``largest``."""
    return ((norm + EPSILON) / largest).clamp_(min=1.0).float()


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def divides_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the optimiser's step may divide the gradients by a float32 number."""
    return is_fused(optimizer) and (not isinstance(optimizer, Sgd) or optimizer.divides)


def step_unless_skipped(
    optimizer: torch.optim.Optimizer, verdict: GradientCheck, divisor: Tensor | None = None
) -> None:
    """Run the optimiser's step unless ``verdict.skip`` is 1; a fused one divides the gradients by ``divisor``.

    If the host cannot read ``skip``, a fused optimiser decides on the device. Otherwise the host decides, which is
    cheaper: a fused optimiser must revert its step count.
    """
    given = {} if divisor is None else {"grad_scale": divisor}
    if not known_to_host(verdict.skip) and is_fused(optimizer):
        given["found_inf"] = verdict.skip
    elif verdict.skip.item():  # on a device: an unfused optimiser of an older checkpoint; the host waits
        return
    vars(optimizer).update(given)  # as GradScaler does
    try:
        optimizer.step()
    finally:
        for name in given:
            delattr(optimizer, name)


def learning_rate(step: int, total: int, peak: float, warmup: float, schedule: str = "cosine") -> float:
    """Return the learning rate of a step: linear warm-up, then a half cosine to zero, or another ``schedule``.

    The warm-up takes the fraction ``warmup`` of all steps (Loshchilov, Hutter 2017). ``step`` counts from 0; the rates
    of the first and the last step are above 0.
    """
    rising = math.ceil(warmup * total)
    if step < rising:
        return peak * (step + 1) / rising
    falling = max(1, total - rising)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / falling))
    return peak * (1 - (step - rising) / falling) if schedule == "linear" else peak


class AveragedWeights:
    """Exponential moving average (EMA) of a model's trained parameters (Polyak, Juditsky 1992).

    Buffers and frozen parameters are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained = list(trained.values())
        self.weights = {name: p.detach().clone() for name, p in trained.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Set the averages to the current weights."""
        torch._foreach_copy_(list(self.weights.values()), list[Tensor](self._trained))

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update the averages after step number ``step`` (from 0) unless ``skip`` (a float32 scalar) is 1.

        If the host knows that ``skip`` is 1, the averages are not accessed.
        """
        share = 1 - min(self._decay, (1 + step) / (EARLY + step))
        averages = [local_tensor(average) for average in self.weights.values()]
        weights = [local_tensor(weight) for weight in self._trained]
        if not known_to_host(skip):
            # With a share from the device it launches a kernel per tensor, but moves 12 bytes a weight instead of 32.
            taken = share * (1 - skip)
            shares = {dtype: taken.to(dtype) for dtype in {average.dtype for average in averages}}
            torch._foreach_lerp_(averages, weights, [shares[average.dtype] for average in averages])
        elif not skip:
            torch._foreach_lerp_(averages, weights, share)

    def forward(self, *inputs: Tensor, **documents: Tensor) -> Tensor:
        """Return the model's outputs for ``inputs``, computed with the averaged weights."""
        return functional_call(self._model, self.weights, inputs, documents)

    def state_dict(self) -> StateDict:
        return dict(self.weights)

    def load_state_dict(self, state: StateDict) -> None:
        for name, tensor in state.items():
            self.weights[name].copy_(tensor)


class Sgd(torch.optim.SGD):
    """SGD with a fused step on the local shards of divided tensors, for which torch has none.

    The momentum starts from zeros, which gives the first step of torch's SGD, and lets a device skip that step.
    """

    def __init__(self, groups: list[dict[str, Any]], config: TrainingConfig, *, fused: bool) -> None:
        nesterov = config.nesterov
        super().__init__(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=nesterov, fused=fused)
        parameters = [p for group in self.param_groups for p in group["params"]]
        #: True if float32, in which a fused step divides gradients, is exact enough for them.
        self.divides = all(p.dtype != torch.float64 for p in parameters)
        if config.momentum:
            for p in parameters:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["fused"]:
                return super().step(closure)
            alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, ...]]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    gradient = p.grad
                    if isinstance(p, DTensor) and isinstance(gradient, DTensor):  # divided otherwise if not summed yet
                        gradient = gradient.redistribute(placements=p.placements)
                    tensors = (p, gradient, *self.state.get(p, {}).values())
                    alike.setdefault((p.device, p.dtype), []).append(tuple(map(local_tensor, tensors)))
            for rows in alike.values():
                weights, gradients, *momenta = (list(column) for column in zip(*rows, strict=True))
                torch._fused_sgd_(
                    weights,
                    gradients,
                    momenta[0] if momenta else [],
                    **{name: group[name] for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov")},
                    maximize=False,
                    is_first_step=False,
                    grad_scale=getattr(self, "grad_scale", None),
                    found_inf=getattr(self, "found_inf", None),
                )
        return None


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov, Hutter 2019) or SGD for the trained parameters.

    Parameters of fewer than two dimensions (biases, normalisation) have no weight decay. The optimiser is fused unless
    a parameter's dtype has no fused kernel.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    decays = (
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    )
    groups = [group for group in decays if group["params"]]
    fused = all(p.is_floating_point() for p in trained)
    if config.optimizer == "sgd":
        return Sgd(groups, config, fused=fused)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=fused)
