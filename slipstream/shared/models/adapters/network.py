"""Adapters of a whole network: insertion, freezing, quantisation and parameter counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.layers import CODES, SCALES, LoraLinear, initial_std, is_adapter
from slipstream.shared.models.adapters.nf4 import BLOCK, QuantisedWeight, quantise_weight
from slipstream.shared.models.config import LoraConfig
from slipstream.shared.models.initial.drawn import InitialValues, draw_slice


def add_adapters(network: nn.Module, lora: LoraConfig) -> None:
    """Add an adapter to every linear layer named in ``lora.targets`` and freeze all other parameters, in place.

    Raises ``UserError`` if the network has no layer of a target's name, or a layer is narrower than the rank.
    """
    network.requires_grad_(False)
    found = set()
    for path, module in list(network.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in lora.targets and type(module) is nn.Linear:
            if lora.rank > (width := min(module.in_features, module.out_features)):
                raise lora.reject("rank", f"at most {width}, the width of {path}, or model.lora.targets without {name}")
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
                f"expected null, or remove {name.rpartition('.')[2]} from model.lora.targets"
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


#: Approximate number of elements that are quantised at once.
AT_ONCE = 1 << 22


@dataclass
class AdaptedValues:
    """Initial values of a model with adapters.

    ``base`` gives the values of the model without adapters. ``start`` gives the adapters' values; if it is None, they
    are drawn from ``seed``.
    """

    base: InitialValues
    seed: int
    start: InitialValues | None = None
    #: Name of the weight, first row and number of rows that were quantised last.
    _rows: tuple[str, int, int] = ("", 0, 0)
    #: Result for these rows, kept because codes and scales are requested one after the other.
    _parts: QuantisedWeight | None = field(default=None, repr=False)

    @torch.no_grad()
    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill a parameter's slice; see :class:`~slipstream.shared.models.initial.drawn.InitialValues`."""
        if is_adapter(name) and self.start:
            self.start.fill(part, name, size, offsets)
        elif is_adapter(name):
            draw_slice(part, name, size, offsets, std=initial_std(name, size), seed=self.seed)
        elif name.endswith((CODES, SCALES)):
            assert part.shape[1] == size[1], "nothing divides the rows of weights in four bits"
            codes = name.endswith(CODES)
            weight = f"{name.removesuffix(CODES).removesuffix(SCALES)}.weight"
            found = self._quantised(part, weight, size[0], size[1] * (2 if codes else BLOCK), offsets[0])
            part.copy_(found.codes if codes else found.scales)
        else:
            self.base.fill(part, name, size, offsets)

    def _quantised(self, part: Tensor, weight: str, out: int, width: int, first: int) -> QuantisedWeight:
        """Quantise ``len(part)`` rows of ``weight`` ``[out, width]``, starting at row ``first``."""
        rows = weight, first, len(part)
        if self._parts is None or self._rows != rows:
            self._parts, self._rows = None, rows
            found, step = list[QuantisedWeight](), max(1, AT_ONCE // width)
            for start in range(first, first + len(part), step):
                plain = torch.empty(min(step, first + len(part) - start), width, device=part.device)
                self.base.fill(plain, weight, (out, width), (start, 0))
                found.append(quantise_weight(plain))
            empty = quantise_weight(torch.empty(0, width, device=part.device))
            self._parts = QuantisedWeight(*map(torch.cat, zip(empty, *found, strict=True)))
        return self._parts


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
