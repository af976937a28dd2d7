"""Parallel plan: how a model may be divided among devices, stated by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

#: Treatment of a module by tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"):
#:
#: - ``embedding``: an embedding whose vocabulary is divided
#: - ``column``: a linear layer whose outputs are divided and stay so
#: - ``row``: a linear layer whose inputs are divided already; its output is the sum over the devices
#: - ``region``: a module with ``column`` and ``row`` layers that needs the whole sequence as its input and adds it to
#:   nothing: a residual connection goes around it
#: - ``norm``: a normalisation of hidden states ``[batch, sequence, hidden]``
#: - ``head norm``: a normalisation of ``[batch, sequence, heads, head size]``, with divided heads
#: - ``head``: the layer that gives the logits, divided along the vocabulary; its output is whole. A module without
#:   parameters that is called with hidden states and a divided weight counts, too
Style = Literal["embedding", "column", "row", "region", "norm", "head norm", "head"]


@dataclass(frozen=True)
class Plan:
    """Parallel plan of a model, returned by its method ``plan()``.

    ``blocks`` are the names of its repeated modules in the order in which they run. A block is a unit of sharding, and
    a pipeline is cut between blocks. ``tensor`` gives the style of modules by name. ``divisible`` maps settings that
    the degree of tensor parallelism must divide to their values. ``sequence`` is the length that sequence parallelism
    must divide.

    ``cut(start, stop)`` removes everything that the stage of the blocks from ``start`` to ``stop`` does not need. The
    first stage takes the model's input, every other one hidden states ``[batch, *hidden]``. Every stage but the last
    returns hidden states, passed on in bf16 if training computes in it. With ``takes_ids`` later stages also get the
    row's ids ``[batch, length]`` as ``ids``.
    """

    blocks: tuple[str, ...]
    tensor: Mapping[str, Style]
    divisible: Mapping[str, int]
    sequence: int
    hidden: tuple[int, ...]
    cut: Callable[[int, int], None]
    takes_ids: bool = False


def plan_of(model: nn.Module) -> Plan | None:
    """Return the model's own plan, or None."""
    stated = getattr(model, "plan", None)
    return stated() if callable(stated) else None


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's blocks.

    Without a plan these are the outermost modules of the repeated class that holds most parameters, or empty. A class
    has no blocks if most of its modules are parts of another such class, as linear layers are of a decoder's, however
    large a separate one may be.
    """
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
    """Return the names that are not below another name."""
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def contain_most(modules: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Return True if more than half of the ``names`` are below one of the ``modules``."""
    below = tuple(f"{module}." for module in modules)
    return 2 * sum(name.startswith(below) for name in names) > len(names)


def parameters_in(model: nn.Module, names: tuple[str, ...]) -> int:
    return sum(parameter.numel() for name in names for parameter in model.get_submodule(name).parameters())
