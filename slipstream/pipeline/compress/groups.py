"""Groups of a model's units that have to be removed together.

Torch-Pruning (Fang et al. 2023, "DepGraph: Towards Any Structural Pruning") traces which outputs and inputs of layers
are the same unit. A group is pruned only if permuting its units in all layers does not change the outputs, and all its
layers can be pruned.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.shared.errors import UserError
from slipstream.shared.models.factory import Predictor, zero_inputs
from slipstream.shared.models.pruning import LAYERS, Side, can_be_pruned, count_units, prune_model
from slipstream.shared.models.transformer import Transformer

#: Rows of random inputs on which exchanging units must not change the outputs, and the rounding tolerance as a share of
#: the largest output.
ROWS, TOLERANCE = 8, 1e-4


@dataclass(frozen=True)
class PruningGroupMember:
    """Inputs or outputs of a layer (``side``), with their indices per unit, int64 ``[units, per unit]``."""

    name: str
    side: Side
    indices: Tensor


@dataclass(frozen=True)
class PruningGroup:
    """Units that are removed from all ``members`` together.

    They form ``blocks`` of equal length, which all keep equal numbers of units, as group normalisation requires.
    """

    units: int
    blocks: int
    members: tuple[PruningGroupMember, ...]

    @property
    def name(self) -> str:
        return self.members[0].name

    def retained(self, chosen: Sequence[int]) -> dict[str, dict[str, list[int]]]:
        """Return the argument of :func:`.pruning.prune_model` that keeps the units ``chosen``, in this order."""
        kept_units: dict[str, dict[str, list[int]]] = {}
        for member in self.members:
            picked = member.indices[torch.tensor(chosen)]
            # The indices of a unit of a flattened layer are adjacent or strided; either way their order has to stay.
            together = member.indices.shape[1] == 1 or bool((member.indices[:, 1] - member.indices[:, 0] == 1).all())
            kept_units.setdefault(member.name, {})[member.side] = (picked if together else picked.T).flatten().tolist()
        return kept_units


def unite_prunings(parts: Sequence[Mapping[str, Mapping[str, list[int]]]]) -> dict[str, dict[str, list[int]]]:
    together: dict[str, dict[str, list[int]]] = {}
    for part in parts:
        for name, sides in part.items():
            together.setdefault(name, {}).update(sides)
    return together


def find_groups(model: Predictor) -> list[PruningGroup]:
    """Return the groups of ``model`` that can be pruned, in tracing order; it must be in evaluation mode.

    Raises ``UserError`` if the model cannot be traced or has no removable units.
    """
    if isinstance(model.network, Transformer):
        return feed_forward(model.network)
    traced = trace_groups(model)
    shared = {id(p) for p, number in Counter(uses_of_parameters(model.network)).items() if number > 1}
    groups = (group_of(model.network, members, shared) for members in traced)
    prunable = [group for group in groups if group and exchangeable(model, group)]
    if not prunable:
        raise UserError(
            "compression.method: this model has no units that can be removed; expected linear layers or convolutions "
            "that follow each other, or choose distil, which trains a smaller model"
        )
    return prunable


def feed_forward(network: Transformer) -> list[PruningGroup]:
    """Return the hidden units of a transformer's feed-forward layers, one group per layer.

    Torch-Pruning cannot follow units through attention heads.
    """
    pairs = []
    for number in network.model.layers:
        name = f"model.layers.{number}.mlp"
        hidden = torch.arange(count_units(network.get_submodule(f"{name}.down_proj"), "in"))[:, None]
        sides: dict[str, Side] = {"gate_proj": "out", "up_proj": "out", "down_proj": "in"}
        members = (PruningGroupMember(f"{name}.{layer}", side, hidden) for layer, side in sides.items())
        pairs.append(PruningGroup(len(hidden), 1, tuple(members)))
    return pairs


def uses_of_parameters(network: nn.Module) -> list[nn.Parameter]:
    return [p for module in network.modules() for p in module.parameters(recurse=False)]


def trace_groups(model: Predictor) -> list[list[tuple[nn.Module, Side, list[int], list[int]]]]:
    """Return the traced groups as lists of layer, side, indices, and the unit of every index."""
    from torch_pruning import DependencyGraph

    inputs = standardised(model, example_inputs(model))
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            graph = DependencyGraph().build_dependency(model.network, list(inputs), verbose=False)
            traced = []
            for group in graph.get_all_groups():
                members = []
                for item in group:
                    side: Side = "out" if graph.is_out_channel_pruning_fn(item.dep.handler) else "in"
                    members.append((item.dep.target.module, side, list(item.idxs), list(item.root_idxs)))
                traced.append(members)
            return traced
    except Exception as error:
        raise UserError(
            f"compression.method: this model cannot be traced ({type(error).__name__}: {error}); choose distil, "
            "which trains a smaller model"
        ) from error


def example_inputs(model: Predictor) -> list[Tensor]:
    """Return valid inputs of :data:`ROWS` rows, random where they are floating-point."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(x.shape, generator=generator).to(x.dtype) if x.is_floating_point() else x
        for x in zero_inputs(model.signature, ROWS)
    ]


def standardised(model: Predictor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the arguments that the predictor passes to its inner module for ``inputs``."""
    given: list[tuple[Tensor, ...]] = []
    hook = model.network.register_forward_pre_hook(lambda _, arguments: given.append(arguments))
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        hook.remove()
    return given[0]


def group_of(
    network: nn.Module, traced: Sequence[tuple[nn.Module, Side, list[int], list[int]]], shared: set[int]
) -> PruningGroup | None:
    """Return the group of traced members; None if a layer cannot be pruned or the units are the model's outputs."""
    names = {module: name for name, module in network.named_modules()}
    count, members = len(traced[0][2]), []
    for module, side, indices, roots in traced:
        if not any(True for _ in module.parameters()) and type(module).__module__.startswith("torch_pruning"):
            continue  # an operation without tensors
        if module not in names or not can_be_pruned(module) or any(id(p) in shared for p in module.parameters()):
            return None
        side = side if side in LAYERS[type(module)] else "out"
        if len(indices) != count_units(module, side) or len(indices) % count or len(roots) != len(indices):
            return None
        by_unit = torch.tensor(indices)[torch.argsort(torch.tensor(roots), stable=True)].reshape(count, -1)
        members.append(PruningGroupMember(names[module], side, by_unit))
    if not any(member.side == "in" for member in members):
        return None
    norms = [network.get_submodule(member.name) for member in members]
    blocks = math.lcm(*(norm.num_groups for norm in norms if isinstance(norm, nn.GroupNorm)))
    return PruningGroup(count, blocks, tuple(members)) if count % blocks == 0 and count > blocks else None


def exchangeable(model: Predictor, group: PruningGroup) -> bool:
    """Return True if permuting units within their blocks leaves the outputs unchanged.

    The model must also run with one unit less per block.
    """
    places = torch.arange(group.units).reshape(group.blocks, -1)
    generator = torch.Generator().manual_seed(1)
    inputs = [
        x + torch.randn(x.shape, generator=generator) if x.is_floating_point() else x
        for x in standardised(model, example_inputs(model))
    ]
    expected = outputs_with(model.network, group, places, inputs)
    moved = outputs_with(model.network, group, places.roll(1, dims=1), inputs)
    fewer = outputs_with(model.network, group, places[:, 1:], inputs)
    if expected is None or moved is None or fewer is None:
        return False
    return bool((moved - expected).abs().max() <= TOLERANCE * expected.abs().max())


@torch.no_grad()
def outputs_with(network: nn.Module, group: PruningGroup, places: Tensor, inputs: Sequence[Tensor]) -> Tensor | None:
    """Return the outputs of a copy of ``network`` that keeps the units ``places``, in this order.

    Return None if the copy fails, as a model with hard-coded sizes may.
    """
    other = deepcopy(network)
    try:
        prune_model(other, group.retained(places.flatten().tolist()))
        return other(*inputs)
    except Exception:
        return None
