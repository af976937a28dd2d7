"""Structured pruning: removal of units from a model, and the retained units of every module.

A unit is one of a layer's outputs: a neuron or a channel. Removing it shrinks the tensors of its layer, of the
normalisation after it, and of every layer that takes it as an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Side = Literal["out", "in"]
#: Sorted indices of retained outputs and inputs ("out", "in") by module name; unlisted modules are not pruned.
Retained = Mapping[str, Mapping[str, Sequence[int]]]

#: Layer classes that can be pruned, and the names of their attributes with the numbers of outputs and inputs.
LAYERS: dict[type[nn.Module], dict[Side, str]] = {
    nn.Linear: {"out": "out_features", "in": "in_features"},
    nn.Conv1d: {"out": "out_channels", "in": "in_channels"},
    nn.Conv2d: {"out": "out_channels", "in": "in_channels"},
    nn.Conv3d: {"out": "out_channels", "in": "in_channels"},
    nn.ConvTranspose1d: {"out": "out_channels", "in": "in_channels"},
    nn.ConvTranspose2d: {"out": "out_channels", "in": "in_channels"},
    nn.ConvTranspose3d: {"out": "out_channels", "in": "in_channels"},
    nn.BatchNorm1d: {"out": "num_features"},
    nn.BatchNorm2d: {"out": "num_features"},
    nn.BatchNorm3d: {"out": "num_features"},
    nn.GroupNorm: {"out": "num_channels"},
    nn.LayerNorm: {"out": "normalized_shape"},
}


def can_be_pruned(module: nn.Module) -> bool:
    """Return True if :func:`prune_model` supports the module.

    Grouped convolutions, and LayerNorm over several dimensions, are not supported.
    """
    if type(module) not in LAYERS or getattr(module, "groups", 1) != 1:
        return False
    return not isinstance(module, nn.LayerNorm) or len(module.normalized_shape) == 1


def count_units(module: nn.Module, side: Side) -> int:
    """Return the number of outputs or inputs of a layer."""
    size = getattr(module, LAYERS[type(module)][side])
    return size[0] if isinstance(size, tuple) else size


def prune_model(model: nn.Module, retained: Retained) -> None:
    """Remove all but the ``retained`` units, in place; works on the meta device, too.

    Raises ``ValueError`` if the model lacks a module or a unit, or if a module cannot be pruned.
    """
    for name, sides in retained.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"there is no module {name!r}") from None
        if not can_be_pruned(module):
            raise ValueError(f"units of a {type(module).__name__} ({name}) cannot be removed")
        for side, indices in sides.items():
            if side not in ("out", "in") or side not in LAYERS[type(module)]:
                raise ValueError(f"{name} has no side {side!r}")
            if not indices or not 0 <= min(indices) <= max(indices) < count_units(module, side):
                raise ValueError(f"{name} has {count_units(module, side)} units ({side}), not those that were kept")
            select_units(module, side, torch.tensor(indices))


def unit_dimension(module: nn.Module, tensor: Tensor, side: Side) -> int:
    """Return the dimension of a layer's tensor that ``side`` counts, which a tensor without such units lacks."""
    # Weights are [out, in, ...], of transposed convolutions [in, out, ...]; biases and tensors of normalisation are
    # [out]; counters are scalars.
    return int((side == "in") != (tensor.ndim > 1 and type(module).__name__.startswith("ConvTranspose")))


@torch.no_grad()
def select_units(module: nn.Module, side: Side, indices: Tensor) -> None:
    """Keep only the units ``indices`` (int64 ``[retained]``) of one module."""
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        dim = unit_dimension(module, tensor, side)
        if tensor.ndim <= dim:
            continue
        smaller = tensor.index_select(dim, indices.to(tensor.device))
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(module, name, nn.Parameter(smaller, tensor.requires_grad) if is_parameter else smaller)
    size = len(indices)
    setattr(module, LAYERS[type(module)][side], (size,) if isinstance(module, nn.LayerNorm) else size)


def compose_prunings(before: Retained, after: Retained) -> dict[str, dict[str, list[int]]]:
    """Combine two prunings in sequence: ``after`` indexes the units that ``before`` retained."""
    composed = {name: {side: list(indices) for side, indices in sides.items()} for name, sides in before.items()}
    for name, sides in after.items():
        for side, indices in sides.items():
            first = composed.setdefault(name, {}).get(side)
            composed[name][side] = [first[index] for index in indices] if first else list(indices)
    return composed
