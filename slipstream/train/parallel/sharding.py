"""Parameters divided among devices: ZeRO (Rajbhandari et al. 2020) by the switches of PyTorch's FSDP2, and tensor and
sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022) by a model's plan.

For one optimiser step of M micro-batches and P parameter groups (blocks, and one for the rest) FSDP2 has:

===========  ===================================  ===========  ================
what         held in whole on a device            all-gathers  reduce-scatters
===========  ===================================  ===========  ================
optimizer    weights and gradients, during steps  P            P
gradients    weights, during a micro-batch        M P          M P
weights      the weights of one block             2 M P        M P
===========  ===================================  ===========  ================

With tensor parallelism there are plain tensors between modules: hidden states whole on every device, or with sequence
parallelism each device's part of the sequence. Every parameter becomes a ``DTensor``, because fused optimisers accept
no mixture.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
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
from slipstream.models.factory import Predictor
from slipstream.models.plan import Plan, Style, blocks_of
from slipstream.train.parallel.config import ParallelConfig

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model: Predictor, mesh: DeviceMesh, config: ParallelConfig, precision: str) -> None:
    """Divide the parameters among the data-parallel processes of ``mesh`` (``[shard]``, or ``[replicate, shard]``), in
    place: each block is one group, all else another.

    In bf16 the weights are gathered and the blocks' inputs taken as such, and gradients are reduced in float32: the
    copies that autocast makes of float32 weights would all stay until the backward pass.
    """
    # FSDP warns of outputs that are views: nothing here changes an output in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.offload else OffloadPolicy()
    divide_module = partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=config.shard == "weights",
        offload_policy=offload,
        mp_policy=BF16 if precision == "bf16" else MixedPrecisionPolicy(),
    )
    for name in blocks_of(model.network):
        divide_module(model.network.get_submodule(name))
    divide_module(model)


def prepare_passes(model: nn.Module, config: ParallelConfig, *, last: bool) -> None:
    """Prepare the forward and backward pass of a micro-batch, the ``last`` of its step or another."""
    sharded = cast(FSDPModule, model)
    each = config.shard in ("gradients", "weights")
    sharded.set_is_last_backward(last or each)
    sharded.set_requires_gradient_sync(last or each)
    sharded.set_reshard_after_backward(last or each)


def divide_tensors(model: nn.Module, plan: Plan, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divide the model's parameters over the one-dimensional ``mesh``, in place.

    Raises ``UserError`` if the plan leaves a parameter out.
    """
    modules = dict(model.named_modules())
    styles = {name: style_of(modules[name], style, sequence) for name, style in plan.tensor.items()}
    parallelize_module(model, mesh, styles)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UserError(f"model.name: the model's plan for tensor parallelism says nothing of {name}")


def style_of(module: nn.Module, style: Style, sequence: bool) -> ParallelStyle:
    hidden = Shard(1) if sequence else Replicate()
    if style == "embedding":
        return Embedding(input_layouts=Replicate(), output_layouts=hidden)
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


class Embedding(RowwiseParallel):
    """Waits for the hidden states: torch's compiler (2.13) sends the gradient of an unfinished collective's result to
    the wrong tensor."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...], _: bool, module: nn.Module, outputs: DTensor, mesh: DeviceMesh
    ) -> Tensor:
        return outputs.redistribute(placements=output_layouts).to_local()


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
        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return whole(inputs[0], device_mesh, self.hidden), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class TiedHead(Region):
    """The same, and gathers the output, which is divided along its last dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def join(_: nn.Module, inputs: tuple[Tensor, ...], output: DTensor) -> Tensor:
            return output.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_hook(join)
        return super()._apply(module, device_mesh)


def whole(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False).redistribute(placements=[Replicate()])
