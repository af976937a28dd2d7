"""The conditions of bitwise reproducibility, and the notice about those that changed between attempts.

If all conditions are equal, a resumed run ends with the same bits as one that was never interrupted. Otherwise the
samples and their order are the same; the numbers differ by rounding, or by more if a layer depends on how a batch is
divided among processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from slipstream.distributed.process_group import Group
from slipstream.train.config import TrainingConfig
from slipstream.train.parallel.config import ParallelConfig

#: The conditions that say how a global batch is divided into micro-batches.
PARTITIONING = ("processes", "accumulation", "layout")


def conditions(training: TrainingConfig, group: Group) -> dict[str, Any]:
    """What must be equal for bitwise equal numbers, besides the settings that must equal the checkpoint's to resume."""
    gpu = group.device.type == "cuda"
    return {
        "processes": group.world,
        "accumulation": training.accumulation,
        "layout": describe(training.parallel),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": group.backend,
        "device": torch.cuda.get_device_name(group.device) if gpu else torch.backends.cpu.get_cpu_capability(),
    }


def describe(parallel: ParallelConfig) -> str:
    """The layout's settings that are not the defaults."""
    changed = {name: value for name, value in vars(parallel).items() if value != getattr(ParallelConfig(), name)}
    return " ".join(f"{name} {value}" for name, value in changed.items()) or "none"


def describe_changes(then: Mapping[str, Any], now: Mapping[str, Any], model: nn.Module) -> str:
    """A sentence on the conditions that changed since the checkpoint and their effect; empty if none changed."""
    changed = [name for name in now if name in then and then[name] != now[name]]
    if not changed:
        return ""
    changes = ", ".join(f"{name} {then[name]} -> {now[name]}" for name in changed)
    layers = batch_dependent_layers(model) if set(changed) & set(PARTITIONING) else []
    numbers = f"other numbers ({', '.join(layers)})" if layers else "the numbers equal but for rounding"
    return f"not bit for bit ({changes}): the same samples in the same order, {numbers}"


def batch_dependent_layers(model: nn.Module) -> list[str]:
    """Types of layers whose result depends on how a batch is divided: batch normalisation and dropout."""
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
