"""Adapters of a whole network: insertion, freezing, quantisation and parameter counts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.layers import CODES, SCALES, LoraLinear, is_adapter
from slipstream.shared.models.adapters.nf4 import BLOCK
from slipstream.shared.models.config import LoraConfig


def add_adapters(network: nn.Module, lora: LoraConfig) -> None:
    """Add an adapter to every linear layer named in ``lora.targets`` and freeze all other parameters, in place.

    Raises ``UserError`` if the network has no layer of a target's name.
    """
    network.requires_grad_(False)
    found = set()
    for path, module in list(network.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in lora.targets and type(module) is nn.Linear:
            setattr(network.get_submodule(parent), name, LoraLinear(module, lora))
            found.add(name)
    if missing := next((target for target in lora.targets if target not in found), None):
        raise UserError(f"model.lora.targets: {missing!r} is not a linear layer of {type(network).__name__}")


def layers_with_adapters(network: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield name and module of every layer with an adapter, in the network's order."""
    return ((name, module) for name, module in network.named_modules() if isinstance(module, LoraLinear))


def quantise_frozen(network: nn.Module) -> None:
    """Store the frozen weights of the layers with adapters in four bits, in place.

    Raises ``UserError`` if a layer's number of inputs is not a multiple of :data:`.nf4.BLOCK`.
    """
    for name, layer in layers_with_adapters(network):
        if layer.in_features % BLOCK:
            raise UserError(
                f"model.quantise: {name} takes {layer.in_features} inputs, which is not a multiple of {BLOCK}; "
                f"expected none, or remove {name.rpartition('.')[2]} from model.lora.targets"
            )
        layer.quantise()


def hold_frozen(network: nn.Module, precision: str) -> None:
    """Convert all frozen parameters to bf16, in place, if ``precision`` is bf16.

    Results do not change: autocast would round the same numbers in every pass, and keep the copies until the pass ends.
    """
    if precision == "bf16":
        for parameter in network.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)


def plain_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return parameter shapes, by name, of the equivalent network without adapters."""
    layers, shapes = dict(layers_with_adapters(network)), dict[str, tuple[int, ...]]()
    for name, parameter in network.named_parameters():
        if name.endswith(CODES):
            layer = layers[name.removesuffix(CODES)]
            shapes[f"{name.removesuffix(CODES)}.weight"] = layer.out_features, layer.in_features
        elif not is_adapter(name) and not name.endswith(SCALES):
            shapes[name] = tuple(parameter.shape)
    return shapes


def numbers_in(model: nn.Module) -> int:
    """Return the number of parameters; shared parameters count once, a byte of four-bit weights as two."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(2 * n if name.endswith(CODES) else n for name, n in sizes.items() if not name.endswith(SCALES))


def numbers_trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
