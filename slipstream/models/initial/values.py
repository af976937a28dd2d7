"""Where the values of a model's parameters come from before it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class InitialValues(Protocol):
    """Gives every parameter its values, each device those of the part that it holds."""

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill ``part`` in place, which is the part of the parameter ``name`` of ``size`` that begins at ``offsets``.

        A parameter is divided along its first dimension, or one of two dimensions along either. Raises ``UserError`` if
        there are no such values.
        """


@torch.no_grad()
def fill(model: nn.Module, values: InitialValues) -> None:
    """Fill all parameters of a model, which are whole."""
    for name, parameter in model.named_parameters():
        values.fill(parameter, name, parameter.shape, (0,) * parameter.ndim)
