"""Short trainings of a small transformer: under a layout, and on one process by hand."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.initial.drawn import DrawnValues

if TYPE_CHECKING:
    from slipstream.pipeline.train.checkpoint.manager import Checkpoints
    from slipstream.pipeline.train.parallel.layout import Layout, ParallelModel

LENGTH = 16
SIGNATURE = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=256)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH, SHORT_BATCH, CLIP, RATE, SEED = 12, 7, 0.5, 3e-3, 3
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
PATIENCE_S = 60
PATIENCE = timedelta(seconds=PATIENCE_S)


@dataclass(frozen=True)
class LayoutCase:
    """Layout of ``world`` processes, and the training under it."""

    world: int
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 3
    steps: int = 12
    double: bool = True
    compile: bool = False
    #: Token after which another document starts, if documents attend to themselves alone.
    document_end: int = -1
    #: "cuda" for a GPU per process.
    device: str = "cpu"
    #: Checkpoint directory, step after which a checkpoint is saved, and whether to start from the newest.
    home: str = ""
    save_at: int = 0
    resume: bool = False


@dataclass(frozen=True)
class LayoutResult:
    """Mean loss and gradient norm of every step, and the whole weights afterwards.

    ``restored`` are the weights and the optimiser's moments from a checkpoint.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    restored: dict[str, Tensor] = field(default_factory=dict)


def token_rows(rows: int) -> Tensor:
    """Return rows of ``LENGTH + 1`` bytes of Python's own sources (int64)."""
    text = b"".join(inspect.getsource(module).encode() for module in (argparse, ast))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: rows * (LENGTH + 1)].view(rows, -1).long()


def batches(steps: int) -> Iterator[Tensor]:
    """Yield the global batches; every fifth is short."""
    rows, start = token_rows(600), 0
    for step in range(steps):
        size = SHORT_BATCH if step % 5 == 4 else BATCH
        yield rows[start : start + size]
        start += size


def row_losses(outputs: Tensor, rows: Tensor) -> Tensor:
    """Return the mean loss of the tokens of every row: ``[rows]``."""
    return functional.cross_entropy(outputs.transpose(1, 2), rows[:, 1:], reduction="none").mean(dim=1)


def model_of(case: LayoutCase, *, empty: bool) -> Any:
    signature = replace(SIGNATURE, document_end=case.document_end)
    predictor = build_model(ModelConfig("transformer", {**SIZES, **case.model}), signature, SEED, empty=empty)
    return predictor.double() if case.double else predictor


def by_hand(case: LayoutCase) -> LayoutResult:
    """Train on one process without any layout."""
    torch.set_num_threads(1)
    # Filled in the type that is computed in, as a layout does.
    from slipstream.pipeline.train.parallel.divide import fill_part

    model = model_of(case, empty=True)
    fill_part(model, torch.device("cpu"), DrawnValues(model.network, SEED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    losses, norms = [], []
    for batch in batches(case.steps):
        loss = row_losses(model(batch[:, :-1]), batch).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return LayoutResult(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


@functools.lru_cache
def expected(model: tuple[tuple[str, Any], ...], steps: int, double: bool, document_end: int = -1) -> LayoutResult:
    return by_hand(LayoutCase(1, {}, dict(model), steps=steps, double=double, document_end=document_end))


def distance(found: LayoutResult, case: LayoutCase) -> float:
    """Return the largest difference from the training on one process: of losses, weights and (relative) norms."""
    one = expected(tuple(case.model.items()), case.steps, case.double, case.document_end)
    assert found.weights.keys() == one.weights.keys()
    weights = max((found.weights[name] - one.weights[name]).abs().max().item() for name in one.weights)
    losses = max(abs(a - b) for a, b in zip(found.losses, one.losses, strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(found.norms, one.norms, strict=True))
    return max(weights, losses, norms)


class DividedTraining(NamedTuple):
    """Part of one rank in a case, before the first step. ``rows`` is the size of its micro-batches."""

    layout: Layout
    model: ParallelModel
    rows: int
    optimizer: torch.optim.Optimizer
    checkpoints: Checkpoints | None


def device_of(case: LayoutCase) -> torch.device:
    return torch.device("cuda", dist.get_rank()) if case.device == "cuda" else torch.device("cpu")


def set_up(case: LayoutCase) -> DividedTraining:
    from slipstream.pipeline.train.checkpoint.manager import Checkpoints
    from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
    from slipstream.pipeline.train.checkpoint.state import AppState
    from slipstream.pipeline.train.loop.probe import ModelTraits
    from slipstream.pipeline.train.parallel.compiled import compile_blocks
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model, fill_part
    from slipstream.pipeline.train.parallel.layout import Layout
    from slipstream.pipeline.train.parallel.replicas import ReplicatedModel, replicate_model
    from slipstream.shared.distributed.process_group import RankContext

    device = device_of(case)
    layout = Layout.connect(ParallelConfig(**case.parallel), dist.get_rank(), dist.get_world_size(), device)
    rows = math.ceil(math.ceil(BATCH / layout.data_size) / case.accumulation)
    predictor = model_of(case, empty=True)
    values = DrawnValues(predictor.network, SEED)
    model: ParallelModel
    padding = torch.zeros(case.accumulation * rows, LENGTH, dtype=torch.long, device=device)
    pieces = [slice(start, start + rows) for start in range(0, len(padding), rows)]
    if layout.config.divides:
        size = {"micro_batches": case.accumulation, "rows": rows}
        model = divide_model(predictor, layout, device, values, **size, precision="fp32")
        if case.compile:
            compile_blocks(model, (padding,), pieces, contextlib.nullcontext)
    else:
        fill_part(predictor, device, values)
        alone = ReplicatedModel(predictor)
        compiled = compile_blocks(alone, (padding,), pieces, contextlib.nullcontext) if case.compile else None
        model = replicate_model(
            predictor,
            ModelTraits(),
            RankContext(layout.rank, layout.world, device, dist.get_backend()),
            compiled=compiled,
        )
    torch._dynamo.config.error_on_recompile = case.compile
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=RATE, fused=True)
    policy = ResumePolicy({}, layout=layout.sizes if layout.config.divides else ())
    state = AppState(model.model, optimizer)
    checkpoints = Checkpoints(case.home, state, policy, timeout=PATIENCE) if case.home else None
    return DividedTraining(layout, model, rows, optimizer, checkpoints)


def loss_factor(ranks: int, rows: int) -> float:
    """Return the factor of a rank's sum of losses, for the mean over all rows; gradients are averaged over ranks."""
    return ranks / rows


def train_divided(case: LayoutCase) -> LayoutResult:
    """Train one rank's part under the case's layout."""
    layout, model, rows, optimizer, checkpoints = set_up(case)
    device, losses, norms = device_of(case), [], []
    start, restored = 0, {}
    if case.resume and checkpoints:
        found = checkpoints.restore()
        assert found is not None
        start, restored = found.step, whole_state(model, optimizer)
    for step, batch in list(enumerate(batches(case.steps)))[start:]:
        size, (place, places) = len(batch), (layout.data_rank, layout.data_size)
        mine = batch[place * size // places : (place + 1) * size // places]
        padded = torch.cat([mine, torch.zeros(case.accumulation * rows - len(mine), LENGTH + 1, dtype=torch.long)])
        padded = padded.to(device)
        pieces = [slice(start, start + rows) for start in range(0, len(padded), rows)]
        total = torch.zeros((), dtype=torch.float64, device=device)

        def loss_of(outputs: Tensor, first: int) -> Tensor:
            of_rows = slice(first, first + len(outputs))
            real = torch.arange(len(padded), device=device)[of_rows] < len(mine)  # noqa: B023  # called within this step
            loss = (row_losses(outputs, padded[of_rows]) * real).sum()  # noqa: B023
            total.add_(loss.detach())  # noqa: B023
            return loss * loss_factor(places, size)  # noqa: B023

        model.accumulate((padded[:, :-1],), pieces, loss_of)
        norm = model.norm()
        model.clip(norm, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        summed = total * model.counts_losses
        dist.all_reduce(summed)
        losses.append(summed.item() / size)
        norms.append(norm.item())
        if checkpoints and step + 1 == case.save_at:
            checkpoints.save(step + 1, {})
            checkpoints.finish()
            restored = whole_state(model, optimizer)
    return LayoutResult(losses, norms, whole(dict(model.model.named_parameters())), restored)


def whole_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all weights and moments, gathered on every rank."""
    mine = dict(model.model.named_parameters())
    moments = {f"{name}.{moment}": optimizer.state[p][moment] for name, p in mine.items() for moment in MOMENTS}
    return whole({**mine, **moments})


def whole(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole tensors of all ranks, gathered on every rank."""
    gathered = {name: x.full_tensor() if isinstance(x, DTensor) else x.detach().clone() for name, x in mine.items()}
    gathered = {name: tensor.cpu() for name, tensor in gathered.items()}
    everyones: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, gathered)
    return {name: tensor for one in everyones for name, tensor in one.items()}
