"""Interface to the initial values of a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class InitialValues(Protocol):
    """Initial values of parameters; every device fills only the slices that it holds."""

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill ``part``, a slice that starts at ``offsets`` of the parameter ``name`` with shape ``size``.

        A parameter is divided along its first dimension; a parameter of two dimensions along either. Raises
        ``UserError`` if the values are missing.
        """


@torch.no_grad()
def fill_parameters(model: nn.Module, values: InitialValues) -> None:
    """Fill all parameters of an undivided model."""
    for name, parameter in model.named_parameters():
        values.fill(parameter, name, parameter.shape, (0,) * parameter.ndim)
