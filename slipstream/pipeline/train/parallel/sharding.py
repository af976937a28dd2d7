"""Parameters divided among devices: ZeRO by FSDP2, tensor and sequence parallelism by plans.

With tensor parallelism plain tensors pass between modules: hidden states, replicated or, with sequence parallelism,
divided along the sequence. Every parameter becomes a ``DTensor``, because fused optimisers accept no mixture.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.errors import UserError
from slipstream.shared.machine.torch_versions import divide_by_fsdp
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.plan import ParallelPlan, Style, block_names

#: Replaces autocast, whose bf16 copies of float32 weights would all last until the backward pass.
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# Sources: Rajbhandari et al. 2020; Shoeybi et al. 2019; Korthikanti et al. 2022. For one optimiser step of M
# micro-batches and P parameter groups (one per block, and one for other parameters) FSDP2 has:
#
# ===========  ===================================  ===========  ================
# shard        unsharded on a device                all-gathers  reduce-scatters
# ===========  ===================================  ===========  ================
# optimizer    weights and gradients, during steps  P            P
# gradients    weights, during a micro-batch        M P          M P
# weights      the weights of one block             2 M P        M P
# ===========  ===================================  ===========  ================
def shard_parameters(model: Predictor, mesh: DeviceMesh, config: ParallelConfig, precision: str) -> None:
    """Divide the parameters among the data-parallel processes of ``mesh``, in place.

    The mesh is ``[shard]`` or ``[replicate, shard]``. Every block is one FSDP group, all other parameters another. In
    bf16 the weights are gathered and the blocks' inputs are cast to bf16, and gradients are reduced in float32.
    """
    # FSDP warns of outputs that are views, but no output is changed in place here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.offload else OffloadPolicy()
    divide_module = partial(
        divide_by_fsdp,
        mesh=mesh,
        reshard_after_forward=config.shard == "weights",
        offload_policy=offload,
        mp_policy=BF16 if precision == "bf16" else MixedPrecisionPolicy(),
    )
    for name in block_names(model.network):
        divide_module(model.network.get_submodule(name))
    divide_module(model)


def prepare_passes(model: nn.Module, config: ParallelConfig, *, last: bool) -> None:
    """Set FSDP's options for the passes of a micro-batch; ``last`` is True for the last of a step."""
    sharded = cast(FSDPModule, model)
    each = config.shard in ("gradients", "weights")
    sharded.set_is_last_backward(last or each)
    sharded.set_requires_gradient_sync(last or each)
    sharded.set_reshard_after_backward(last or each)


def divide_tensors(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divide the model's parameters over the one-dimensional ``mesh``, in place.

    Raises ``UserError`` if the plan misses a parameter.
    """
    modules = dict(model.named_modules())
    styles = {name: style_of(modules[name], style, sequence) for name, style in plan.tensor.items()}
    parallelize_module(model, mesh, styles)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UserError(f"model.name: the model's plan for tensor parallelism does not list {name}")


def style_of(module: nn.Module, style: Style, sequence: bool) -> ParallelStyle:
    hidden = Shard(1) if sequence else Replicate()
    if style == "embedding":
        return EmbeddingParallel(input_layouts=Replicate(), output_layouts=hidden)
    if style == "column":
        return ColwiseParallel()
    if style == "row":
        return RowwiseParallel(output_layouts=hidden)
    if style == "region":
        return RegionParallel(hidden)
    if style == "norm":
        return NormParallel(hidden)
    if style == "head norm":
        return NormParallel(Shard(2))
    if any(True for _ in module.parameters()):
        return ColwiseParallel(input_layouts=hidden, output_layouts=Replicate())
    return TiedHeadParallel(hidden)


class EmbeddingParallel(RowwiseParallel):
    """Parallel style of an embedding that waits for its collective's result.

    If the collective is unfinished, torch's compiler (2.13) sends the gradient to the wrong tensor.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: tuple[Placement, ...], _: bool, module: nn.Module, outputs: DTensor, mesh: DeviceMesh
    ) -> Tensor:
        return outputs.redistribute(placements=output_layouts).to_local()


class NormParallel(SequenceParallel):
    """Parallel style of a normalisation with replicated parameters, for inputs divided by ``placement``."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(use_local_output=True)
        self.sequence_sharding = (placement,)  # type: ignore[assignment]


class RegionParallel(ParallelStyle):
    """Parallel style that gathers a module's first input along the sequence, once for all its layers."""

    def __init__(self, hidden: Placement) -> None:
        self.hidden = hidden

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return as_replicated(inputs[0], device_mesh, self.hidden), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class TiedHeadParallel(RegionParallel):
    """Parallel style of an output layer with tied weight, a :class:`RegionParallel` that also gathers the output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def join(_: nn.Module, inputs: tuple[Tensor, ...], output: DTensor) -> Tensor:
            return output.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_hook(join)
        return super()._apply(module, device_mesh)


def as_replicated(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False).redistribute(placements=[Replicate()])
