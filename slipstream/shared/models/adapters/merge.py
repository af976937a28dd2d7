"""Merging of adapters into the weights of their layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.shared.models.adapters.layers import LoraLinear
from slipstream.shared.models.adapters.network import layers_with_adapters, plain_shapes


@torch.no_grad()
def merged_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the equivalent network without adapters.

    Merged weights are computed one at a time, to save memory.
    """
    layers, state = dict(layers_with_adapters(network)), network.state_dict()
    for name in plain_shapes(network):
        layer = layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        yield name, layer.merged_weight() if layer else state[name]


@torch.no_grad()
def merge_adapters(network: nn.Module) -> None:
    """Merge all adapters into the network in place, one layer at a time."""
    for path, layer in list(layers_with_adapters(network)):
        parent, _, name = path.rpartition(".")
        setattr(network.get_submodule(parent), name, plain(layer))


def plain(layer: LoraLinear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    linear.weight, linear.bias = nn.Parameter(layer.merged_weight()), layer.bias
    return linear
