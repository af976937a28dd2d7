"""A non-finite value in one rank's gradient is seen by all ranks, and none of them updates its part."""

from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.dispatch import counted
from slipstream.operations.proofs.gpu.layouts import LENGTH, SEED, LayoutCase, model_of, row_losses, token_rows, whole
from slipstream.pipeline.train.parallel.divide import clip_gradients
from slipstream.shared.models.initial.drawn import DrawnValues
from tests.support.layout_runs import on_ranks


def spoil(parallel: dict[str, Any]) -> tuple[float, float, bool]:
    """The norms before and after the last rank spoils an element of its gradient, and whether a weight changes."""
    from slipstream.pipeline.train.checkpoint.staging import local_tensor
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model
    from slipstream.pipeline.train.parallel.layout import Layout

    device, rows = torch.device("cpu"), token_rows(4)
    layout = Layout.connect(ParallelConfig(**parallel), dist.get_rank(), dist.get_world_size(), device)
    undivided = model_of(LayoutCase(2, {}), empty=True)
    values = DrawnValues(undivided.network, SEED)
    model = divide_model(undivided, layout, device, values, micro_batches=2, rows=2, precision="fp32")

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        return row_losses(outputs, rows[first : first + 2]).sum()

    model.accumulate((rows[:, :LENGTH],), [slice(0, 2), slice(2, 4)], loss_of)
    right = model.norm().item()
    if layout.rank == layout.world - 1:
        gradient = list(model.model.parameters())[-1].grad
        assert gradient is not None
        local_tensor(gradient).view(-1)[0] = torch.inf
    norm = model.norm()
    before = whole(dict(model.model.named_parameters()))
    optimizer: Any = torch.optim.AdamW(model.model.parameters(), lr=0.1, fused=True)
    optimizer.found_inf = norm.isfinite().logical_not().float()
    optimizer.step()
    after = whole(dict(model.model.named_parameters()))
    return right, norm.item(), any(not torch.equal(after[name], before[name]) for name in before)


def spoil_each() -> list[tuple[float, float, bool]]:
    return [spoil({"shard": "weights"}), spoil({"pipeline": 2})]


def test_all_ranks_see_what_one_has(tmp_path: Path) -> None:
    for right, norm, changed in chain(*on_ranks(2, spoil_each, tmp_path)):
        assert 0 < right < float("inf") and norm == float("inf") and not changed


def test_gradients_are_scaled_down_at_once_by_type() -> None:
    """With the bits that each by itself would have."""

    def clipped(number: int) -> int:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.zeros(3, 5, dtype=kind)) for kind in (torch.float32, torch.bfloat16) * number]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        norm = torch.tensor(7.3, dtype=torch.float64)
        factor = 0.5 / (norm + 1e-6)
        expected = [p.grad * factor.to(p.dtype) for p in parameters if p.grad is not None]
        kernels = counted(partial(clip_gradients, parameters, norm, 0.5)).kernels
        assert all(
            torch.equal(grad, p.grad) for grad, p in zip(expected, parameters, strict=True) if p.grad is not None
        )
        return kernels

    assert clipped(2) == clipped(20)
