"""How a model may be divided among devices: a plan that the model states beside its own definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

#: What tensor parallelism (Shoeybi et al. 2019, "Megatron-LM") does with a module:
#:
#: - ``embedding``: an embedding whose vocabulary is divided
#: - ``column``: a linear layer whose outputs are divided and stay so
#: - ``row``: a linear layer whose inputs are divided already; its output is the sum over the devices
#: - ``region``: a module that contains ``column`` and ``row`` layers and needs the whole sequence at its input, which
#:   it adds to nothing: a residual connection goes around it
#: - ``norm``: a normalisation of hidden states ``[batch, sequence, hidden]``
#: - ``head norm``: a normalisation of ``[batch, sequence, heads, head size]``, the heads being divided
#: - ``head``: the layer that gives the logits, divided along the vocabulary; its output is whole. A module without
#:   parameters that is called with hidden states and a divided weight counts, too
Style = Literal["embedding", "column", "row", "region", "norm", "head norm", "head"]


@dataclass(frozen=True)
class Plan:
    """How one model may be divided. A model states its plan by a method ``plan()`` that returns one of these.

    ``blocks`` are the names of its repeated modules in the order in which they run; each is a unit of sharding, and a
    pipeline is cut between them. ``tensor`` gives the style of modules by name. ``divisible`` names the settings that
    the degree of tensor parallelism has to divide, with their values. ``cut(start, stop)`` removes all that the stage
    of the blocks from ``start`` to ``stop`` does not need; the first stage takes the model's input, every other one
    hidden states ``[batch, *hidden]``, which every stage but the last returns, and which are handed on in bf16 where
    training computes in it; with ``takes_ids`` these are called with the ids ``[batch, length]`` of the row, too, as
    ``ids``. ``sequence`` is the length that sequence parallelism has to divide.
    """

    blocks: tuple[str, ...]
    tensor: Mapping[str, Style]
    divisible: Mapping[str, int]
    sequence: int
    hidden: tuple[int, ...]
    cut: Callable[[int, int], None]
    takes_ids: bool = False


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model states; None without one."""
    stated = getattr(model, "plan", None)
    return stated() if callable(stated) else None


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """The names of the model's blocks: by its plan, else the outermost modules of the class that holds most
    parameters among those that are repeated; empty if no class is. A class of which most modules are parts of those of
    another, as linear layers are of a decoder's, has no blocks, however large one that stands alone may be."""
    if plan := plan_of(model):
        return plan.blocks
    by_class: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        # Containers have no forward pass of their own, so that nothing can be gathered before it.
        if name and not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            by_class.setdefault(type(module), []).append(name)
    repeated = [outermost(names) for names in by_class.values()]
    candidates = [names for names in repeated if len(names) > 1 and parameters_in(model, names)]
    candidates = [names for names in candidates if not any(contain_most(other, names) for other in candidates)]
    return max(candidates, key=lambda names: parameters_in(model, names), default=())


def outermost(names: list[str]) -> tuple[str, ...]:
    """The names that are not below another one of them."""
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def contain_most(modules: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether more than half of the ``names`` are below one of the ``modules``."""
    below = tuple(f"{module}." for module in modules)
    return 2 * sum(name.startswith(below) for name in names) > len(names)


def parameters_in(model: nn.Module, names: tuple[str, ...]) -> int:
    return sum(parameter.numel() for name in names for parameter in model.get_submodule(name).parameters())
