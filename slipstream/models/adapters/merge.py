"""A network with adapters as one without, which gives the same: each adapter is added to its layer's weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.models.adapters.layers import LoraLinear
from slipstream.models.adapters.network import layers_with_adapters, plain_shapes


@torch.no_grad()
def merged(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the network without adapters, by the names it then has; one after the other, so that no two of
    those that have to be made are there at once."""
    layers, state = dict(layers_with_adapters(network)), network.state_dict()
    for name in plain_shapes(network):
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
