"""ZeRO (Rajbhandari et al. 2020) by the switches of PyTorch's FSDP2.

For one optimiser step of M micro-batches and P parameter groups (blocks, and one for the rest):

===========  ===================================  ===========  ================
what         held in whole on a device            all-gathers  reduce-scatters
===========  ===================================  ===========  ================
optimizer    weights and gradients, during steps  P            P
gradients    weights, during a micro-batch        M P          M P
weights      the weights of one block             2 M P        M P
===========  ===================================  ===========  ================
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from slipstream.models.factory import Predictor
from slipstream.models.plan import blocks_of
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
    settings: Any = {
        "mesh": mesh,
        "reshard_after_forward": config.shard == "weights",
        "offload_policy": offload,
        "mp_policy": BF16 if precision == "bf16" else MixedPrecisionPolicy(),
    }
    for name in blocks_of(model.network):
        fully_shard(model.network.get_submodule(name), **settings)
    fully_shard(model, **settings)


def switch(model: nn.Module, config: ParallelConfig, *, last: bool) -> None:
    """Prepare the forward and backward pass of a micro-batch, the ``last`` of its step or another."""
    sharded = cast(FSDPModule, model)
    each = config.shard in ("gradients", "weights")
    sharded.set_is_last_backward(last or each)
    sharded.set_requires_gradient_sync(last or each)
    sharded.set_reshard_after_backward(last or each)
