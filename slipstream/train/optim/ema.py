"""An exponential moving average of the weights, which is evaluated instead of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.train.optim.gradients import known

#: The decay after t steps is at most (1 + t) / (10 + t), so that the initial weights are soon forgotten (as in
#: TensorFlow's ExponentialMovingAverage).
EARLY = 10.0


class AveragedWeights:
    """The average of a model's parameters over the steps (Polyak, Juditsky 1992, with exponential weights). Buffers are
    the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Take in the weights after the ``step``-th step, counted from 0, unless ``skip`` (a float32 scalar) is 1.

        A step that is known to be skipped does not touch the averages: a checkpoint may be copying them, and only the
        optimiser's step waits for that.
        """
        share = 1 - min(self._decay, (1 + step) / (EARLY + step))
        averages = list(self.weights.values())
        weights: list[Tensor] = list(self._model.parameters())
        if not known(skip):
            shares = share * (1 - skip)
            torch._foreach_lerp_(averages, weights, [shares.to(weight.dtype) for weight in weights])
        elif not skip:
            torch._foreach_lerp_(averages, weights, share)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The model's outputs with the averaged weights."""
        return functional_call(self._model, self.weights, inputs)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            self.weights[name].copy_(tensor)
