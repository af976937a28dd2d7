"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022) by a network's plan.

Between modules there are plain tensors: hidden states whole on every device, or with sequence parallelism each device's
part of the sequence. Every parameter becomes a ``DTensor``, because fused optimisers accept no mixture.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from slipstream.errors import UserError
from slipstream.models.plan import Plan, Style


def divide_tensors(network: nn.Module, plan: Plan, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divide the network's parameters over the one-dimensional ``mesh``, in place.

    Raises ``UserError`` if the plan leaves a parameter out.
    """
    modules = dict(network.named_modules())
    styles = {name: style_of(modules[name], style, sequence) for name, style in plan.tensor.items()}
    parallelize_module(network, mesh, styles)
    for name, parameter in network.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UserError(f"model.name: the network's plan for tensor parallelism says nothing of {name}")


def style_of(module: nn.Module, style: Style, sequence: bool) -> ParallelStyle:
    hidden = Shard(1) if sequence else Replicate()
    if style == "embedding":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden)
    if style == "column":
        return ColwiseParallel()
    if style == "row":
        return RowwiseParallel(output_layouts=hidden)
    if style == "region":
        return Region(hidden)
    if style == "norm":
        return Norm(hidden)
    if style == "head norm":
        return Norm(Shard(2))
    if any(True for _ in module.parameters()):
        return ColwiseParallel(input_layouts=hidden, output_layouts=Replicate())
    return TiedHead(hidden)


class Norm(SequenceParallel):
    """A normalisation of a plain tensor that is divided by ``placement``, with whole parameters on every device."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(use_local_output=True)
        self.sequence_sharding = (placement,)  # type: ignore[assignment]


class Region(ParallelStyle):
    """Gathers a module's first input along the sequence, once for all the layers that it contains."""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return whole(inputs[0], device_mesh, self.hidden), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class TiedHead(Region):
    """The same, and gathers the output, which is divided along its last dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def join(_: nn.Module, inputs: tuple[Any, ...], output: DTensor) -> Tensor:
            return output.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_hook(join)
        return super()._apply(module, device_mesh)


def whole(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False).redistribute(placements=[Replicate()])
