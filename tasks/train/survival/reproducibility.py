"""What exact resume holds fixed, and what a run says when something of it is no longer so.

With all conditions equal a resumed run ends bit for bit like one that was never stopped. Otherwise the samples and
their order are the same, and the numbers too but for rounding, unless a layer depends on how a batch is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tasks.distributed.process_group import Group
from tasks.train.config import TrainingConfig

#: Of the conditions, those that say how a global batch is spread and cut.
SPREAD = ("processes", "accumulation")


def conditions(training: TrainingConfig, group: Group) -> dict[str, Any]:
    """What has to be equal for numbers to be equal to the bit, beside the settings that a checkpoint insists on."""
    gpu = group.device.type == "cuda"
    return {
        "processes": group.world,
        "accumulation": training.accumulation,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(group.device) if gpu else torch.backends.cpu.get_cpu_capability(),
    }


def departure(then: Mapping[str, Any], now: Mapping[str, Any], model: nn.Module) -> str:
    """What changed between the conditions of a checkpoint and of this run, and what that means; "" if nothing did."""
    changed = [name for name in now if name in then and then[name] != now[name]]
    if not changed:
        return ""
    said = ", ".join(f"{name} {then[name]} -> {now[name]}" for name in changed)
    layers = spread_dependent(model) if set(changed) & set(SPREAD) else []
    numbers = f"other numbers ({', '.join(layers)})" if layers else "the numbers equal but for rounding"
    return f"not bit for bit ({said}): the same samples in the same order, {numbers}"


def spread_dependent(model: nn.Module) -> list[str]:
    """The kinds of layers whose result depends on how a batch is spread: batch statistics and dropout."""
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            or (isinstance(module, _DropoutNd) and module.p > 0)
            # Attention and recurrent layers hold their dropout as a number.
            or (isinstance(dropout := getattr(module, "dropout", None), float) and dropout > 0)
        }
    )
