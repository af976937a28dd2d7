"""A network with adapters as one without, which gives the same: each adapter is added to its layer's weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from slipstream.models.adapters.layers import LoraLinear, is_adapter
from slipstream.models.adapters.network import CODES, SCALES, layers_with_adapters


def merged_shapes(network: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """The tensors of :func:`merged` by name, in its order, and their shapes."""
    layers, shapes = dict(layers_with_adapters(network)), dict[str, tuple[int, ...]]()
    for name, tensor in network.state_dict().items():
        if name.endswith(CODES):
            layer = layers[name.removesuffix(CODES)]
            shapes[f"{name.removesuffix(CODES)}.weight"] = layer.out_features, layer.in_features
        elif not is_adapter(name) and not name.endswith(SCALES):
            shapes[name] = tuple(tensor.shape)
    return shapes


@torch.no_grad()
def merged(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the network without adapters, by the names it then has; one after the other, so that no two of
    those that have to be made are there at once."""
    layers, state = dict(layers_with_adapters(network)), network.state_dict()
    for name in merged_shapes(network):
        layer = layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, layer.merged_weight() if layer else state[name]


@torch.no_grad()
def merge(network: nn.Module) -> None:
    """Make the network one without adapters, in place, a layer at a time."""
    for path, layer in list(layers_with_adapters(network)):
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, plain(layer))


def plain(layer: LoraLinear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    linear.weight, linear.bias = nn.Parameter(layer.merged_weight()), layer.bias
    return linear
