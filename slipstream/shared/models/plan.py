"""Parallel plan: a model's own statement of how it can be divided among devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

#: Treatment of a module by tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"):
#:
#: - ``embedding``: an embedding divided along its vocabulary
#: - ``column``: a linear layer divided along its outputs, which stay divided
#: - ``row``: a linear layer whose inputs are already divided; its output is the sum over the devices
#: - ``region``: a module with ``column`` and ``row`` layers that needs the whole sequence as its input; a residual
#:   connection must go around the module, not through it
#: - ``norm``: a normalisation of hidden states ``[batch, sequence, hidden]``
#: - ``head norm``: a normalisation of ``[batch, sequence, heads, head size]``, with divided heads
#: - ``head``: the layer that computes the logits, divided along the vocabulary; its output is gathered. It may be a
#:   module without parameters that is called with hidden states and a divided weight
Style = Literal["embedding", "column", "row", "region", "norm", "head norm", "head"]


@dataclass(frozen=True)
class ParallelPlan:
    """Parallel plan of a model, returned by its method ``plan()``.

    A block is a unit of sharding, and a pipeline is cut between blocks. The first pipeline stage takes the model's
    input, every other stage hidden states. Every stage but the last returns hidden states, in bf16 if training computes
    in bf16.
    """

    #: Names of the model's blocks (repeated modules) in the order of execution.
    blocks: tuple[str, ...]
    #: Style of modules in tensor parallelism, by name.
    tensor: Mapping[str, Style]
    #: Settings whose values must be multiples of the tensor-parallel degree, with these values.
    divisible: Mapping[str, int]
    #: Length of a row, which must be a multiple of that degree for sequence parallelism.
    sequence: int
    #: Shape of a row's hidden states between stages, without the batch dimension.
    hidden: tuple[int, ...]
    #: Function ``cut(start, stop)`` that removes all modules that the stage of blocks ``start`` to ``stop`` does not
    #: need.
    cut: Callable[[int, int], None]
    #: True if later stages also need the row's ids ``[batch, length]``, as the argument ``ids``.
    takes_ids: bool = False
    #: True if the model and its stages also take the argument ``documents``, int32 ``[1, documents + 1]``: the bounds
    #: of the documents in the micro-batch's tokens (:mod:`slipstream.pipeline.train.documents`).
    takes_documents: bool = False


def model_plan(model: nn.Module) -> ParallelPlan | None:
    """Return the model's plan; None if it has no method ``plan``."""
    stated = getattr(model, "plan", None)
    return stated() if callable(stated) else None


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the model's blocks.

    Without a plan they are the outermost modules of the repeated class that holds most parameters; empty if no class
    repeats. A class is excluded if most of its modules are inside another repeated class, as linear layers are in a
    decoder's.
    """
    if plan := model_plan(model):
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
    """Return True if more than half of the modules ``names`` are inside any of ``modules``."""
    below = tuple(f"{module}." for module in modules)
    return 2 * sum(name.startswith(below) for name in names) > len(names)


def parameters_in(model: nn.Module, names: tuple[str, ...]) -> int:
    return sum(parameter.numel() for name in names for parameter in model.get_submodule(name).parameters())
