"""Supported torch versions, and all differences between them that affect this project.

A difference is detected by the newer name, as vendors' builds may have it earlier.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger

#: Oldest supported version, and newest tested version, which ``constraints.txt`` installs.
OLDEST, NEWEST = (2, 11), (2, 13)


def parse_release(version: str) -> tuple[int, int]:
    """Parse a version into numbers: ``(2, 13)`` for ``2.13.0a0+rocm7.1``; raises ``UserError`` if that fails."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise UserError(f"torch {version}: is no version; expected torch {release_text(OLDEST)} or newer")
    return int(found[1]), int(found[2])


def release_text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def check_torch(version: str = torch.__version__) -> str:
    """Return a warning if torch is newer than the tested versions, else "".

    Raises ``UserError`` if it is older than the supported versions.
    """
    if parse_release(version) < OLDEST:
        raise UserError(f"torch {version}: is too old; expected {release_text(OLDEST)} or newer; upgrade torch")
    if parse_release(version) <= NEWEST:
        return ""
    oldest, newest = release_text(OLDEST), release_text(NEWEST)
    return f"torch {version}: is newer than the tested versions {oldest} to {newest}; if it fails, install {newest}"


@cache
def warn_if_untested() -> None:
    """Log the warning of :func:`check_torch` once per process; under torchrun on rank 0 only."""
    warning = check_torch()
    if warning and os.environ.get("RANK", "0") == "0":
        logger("torch").warning("%s", warning)


def wrap_in_ddp(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """Wrap ``model`` in DDP that never broadcasts its buffers.

    The setting is ``forward_sync_buffers``, formerly ``broadcast_buffers``.
    """
    named = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in named else "broadcast_buffers"
    return DistributedDataParallel(model, **{**settings, buffers: False})


def find_collective(name: str, older_name: str) -> Callable[..., Any]:
    return getattr(dist, name, None) or getattr(dist, older_name)


all_gather_single = find_collective("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = find_collective("reduce_scatter_single", "reduce_scatter_tensor")


def accept_any_layout(stage: Any) -> None:
    """Let a stage of a pipeline take inputs of any strides and give outputs in autocast's dtype.

    Newer versions do so by themselves.
    """
    for check in ("_validate_fwd_input", "_validate_fwd_outputs"):
        if hasattr(stage, check):
            setattr(stage, check, lambda *_: None)


def shared_heads(varlen_attn: Callable[..., Any]) -> dict[str, bool]:
    """Return the arguments of ``varlen_attn`` for query heads that share key and value heads; older ones need none."""
    # Not by ``inspect``, which would take longer than the call.
    return {"enable_gqa": True} if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}) else {}


class IntegersWithoutGradients(TorchFunctionMode):
    """Mode in which integer tensors ignore requests for gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.requires_grad_ and not (args[0].is_floating_point() or args[0].is_complex()):
            return args[0]
        return func(*args, **(kwargs or {}))


def divide_by_fsdp(module: nn.Module, **settings: Any) -> None:
    """Apply FSDP2; integer parameters are gathered in their own dtype.

    Older versions request gradients of every parameter, and cast integers to the dtype of mixed precision.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    if hasattr(FSDPParam, "_init_sharding_spec"):
        fully_shard(module, **settings)
        return
    with IntegersWithoutGradients():
        fully_shard(module, **settings)
    group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    for parameter in group.fsdp_params if group else ():
        if not parameter.sharded_param.is_floating_point():
            parameter.init_dtype_attrs = lambda _, uncast=parameter.init_dtype_attrs: uncast(MixedPrecisionPolicy())


@contextmanager
def shapes_known_to_pipelines() -> Iterator[None]:
    """Skip the exchange of shape information in a pipeline's first step, which needs real values.

    Older versions skip it themselves if the shapes are given.
    """
    from torch.distributed.pipelining import stage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    warm_up = getattr(_PipelineSchedule, "_warmup_p2p", None)
    if warm_up is None:
        yield
        return

    def known(schedule: _PipelineSchedule, stages: list[Any], *_: object) -> None:
        for each in stages:
            each._inference_mode = stage.InferenceMode.STATIC

    _PipelineSchedule._warmup_p2p = known  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _PipelineSchedule._warmup_p2p = warm_up  # type: ignore[method-assign]
