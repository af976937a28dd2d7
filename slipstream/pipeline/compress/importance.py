"""Importance of every unit of a group for the loss.

To first order, zeroing a unit's weights changes the loss by the sum of weight times gradient (Molchanov et al. 2019,
"Importance Estimation for Neural Network Pruning"). This change is squared and added up over batches and members.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.pipeline.compress.groups import PruningGroup
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.predict import record_inputs, record_targets

#: Number of batches and rows per batch, evenly spaced in the training split.
BATCHES, ROWS = 32, 64


def unit_importance(model: Predictor, groups: Sequence[PruningGroup], data: PreparedData) -> list[Tensor]:
    """Return the estimates of every group's units, float64 ``[units]``. ``model`` is in evaluation mode."""
    records = data.sample("train", BATCHES * ROWS)
    sums = [torch.zeros(group.units, dtype=torch.float64) for group in groups]
    for start in range(0, len(records), ROWS):
        add_batch(model, groups, records[start : start + ROWS], sums)
    return sums


def add_batch(model: Predictor, groups: Sequence[PruningGroup], records: np.ndarray, sums: Sequence[Tensor]) -> None:
    inputs = [torch.from_numpy(array) for array in record_inputs(model.signature, records)]
    target = torch.from_numpy(record_targets(records))
    model.zero_grad(set_to_none=True)
    outputs = model(*inputs)
    if model.signature.task == "regression":
        loss = functional.mse_loss(outputs[:, 0], target) / model.signature.target_std**2
    else:
        loss = functional.cross_entropy(outputs.flatten(0, -2), target.long().flatten())
    loss.backward()
    for group, total in zip(groups, sums, strict=True):
        for member in group.members:
            changes = change_by_index(model.network.get_submodule(member.name), member.side)
            if changes is not None:
                total += changes[member.indices].sum(dim=1) ** 2
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def change_by_index(module: nn.Module, side: str) -> Tensor | None:
    """Return the sum of weight times gradient for each input (``side`` "in") or output of a layer, in float64.

    It is the first-order change of the loss. None if no parameter with a gradient has that dimension.
    """
    dim = 1 if side == "in" else 0
    sums = [
        (p * p.grad).double().transpose(0, dim).flatten(1).sum(dim=1) if p.ndim > 1 else (p * p.grad).double()
        for p in module.parameters(recurse=False)
        if p.grad is not None and p.ndim > dim
    ]
    return torch.stack(sums).sum(dim=0) if sums else None


def units_to_keep(group: PruningGroup, importance: Tensor, share: float) -> list[int]:
    """Return the units to keep, in order, if about ``share`` of all units are removed.

    The most important units of every block are kept, at least one.
    """
    length = group.units // group.blocks
    number = max(1, round((1 - share) * length))
    best = importance.reshape(group.blocks, length).topk(number, dim=1).indices
    return (best + torch.arange(group.blocks)[:, None] * length).sort(dim=1).values.flatten().tolist()
