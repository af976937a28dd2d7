"""Gradients of adapters under a layout, on real processes, and on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from slipstream.distributed.process_group import Group
from slipstream.models.adapters.layers import is_adapter
from slipstream.models.arithmetic import autocast
from slipstream.models.config import LoraConfig, ModelConfig
from slipstream.models.factory import Predictor, build, initial_values
from slipstream.models.initial.drawn import draw
from slipstream.models.initial.values import InitialValues, fill
from slipstream.train.parallel.recompute import recompute_blocks
from tests.support.bases import LENGTH, SIGNATURE, some_tokens
from tests.support.layout_runs import whole

#: Whole blocks of four-bit weights, and outputs that three processes cannot divide alike.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
LORA = LoraConfig(rank=3, alpha=6.0)
ROWS, SEED = 7, 5


@dataclass(frozen=True)
class Case:
    """A layout, and what is computed under it: ``double`` is float64 all through."""

    base: Path
    quantise: str = "none"
    parallel: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 2
    precision: str = "fp32"
    recompute: bool = False
    double: bool = False

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(base=str(self.base), lora=LORA, quantise=self.quantise)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Louder:
    """Other initial values: both factors of adapters have numbers that matter."""

    values: InitialValues

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        if is_adapter(name):
            draw(part, name, size, offsets, std=0.3, seed=SEED)
        else:
            self.values.fill(part, name, size, offsets)


def predictor_of(case: Case) -> tuple[Predictor, InitialValues]:
    predictor = build(case.model, SIGNATURE, SEED, empty=True)
    values = Louder(initial_values(case.model, predictor.network, SEED))
    if case.recompute:
        recompute_blocks(predictor.network)
    return (predictor.double() if case.double else predictor), values


def rows_of_batch() -> Tensor:
    return some_tokens(ROWS, LENGTH + 1)


def losses(outputs: Tensor, rows: Tensor) -> Tensor:
    outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
    return functional.cross_entropy(outputs.transpose(1, 2), rows[:, 1:], reduction="none").mean(dim=1)


def alone(case: Case) -> dict[str, Tensor]:
    """The gradients of one process's pass over the batch."""
    torch.set_num_threads(1)
    predictor, values = predictor_of(case)
    fill(predictor.network.to_empty(device="cpu"), values)
    rows = rows_of_batch()
    with autocast(case.precision, torch.device("cpu")):
        outputs = predictor(rows[:, :-1])
    losses(outputs, rows).mean().backward()
    return {name: p.grad.clone() for name, p in predictor.named_parameters() if p.grad is not None}


def gradients(case: Case) -> dict[str, Tensor]:
    """One rank's part of the same; the gradients, whole."""
    from slipstream.train.loop.probe import Traits
    from slipstream.train.parallel.config import ParallelConfig
    from slipstream.train.parallel.divide import divide
    from slipstream.train.parallel.layout import Layout
    from slipstream.train.parallel.model import ParallelModel
    from slipstream.train.parallel.replicas import replicate

    device, world = torch.device("cpu"), dist.get_world_size()
    layout = Layout.connect(ParallelConfig(**case.parallel), dist.get_rank(), world, device)
    place, places = layout.data_rank, layout.data_size
    each = math.ceil(math.ceil(ROWS / places) / case.accumulation)
    predictor, values = predictor_of(case)
    model: ParallelModel
    if layout.config.divides:
        size = {"micro_batches": case.accumulation, "rows": each}
        model = divide(predictor, layout, device, values, **size, precision=case.precision)
    else:
        fill(predictor.network.to_empty(device="cpu"), values)
        model = replicate(predictor, Traits(), Group(layout.rank, world, device, "gloo"))
    rows = rows_of_batch()
    mine = rows[place * ROWS // places : (place + 1) * ROWS // places]
    padded = torch.cat([mine, torch.zeros(case.accumulation * each - len(mine), LENGTH + 1, dtype=torch.long)])

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        of_rows = slice(first, first + len(outputs))
        real = torch.arange(len(padded))[of_rows] < len(mine)
        return (losses(outputs, padded[of_rows]) * real).sum() * places / ROWS

    pieces = [slice(start, start + each) for start in range(0, len(padded), each)]
    forward = partial(autocast, case.precision, device) if case.precision != "fp32" else nullcontext
    model.accumulate((padded[:, :-1],), pieces, loss_of, forward)
    check_types(model.model_parts)
    found = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
    assert all(map(is_adapter, found))
    return whole(found)


def check_types(parts: Sequence[Predictor]) -> None:
    """What four bits are held in, and what FSDP2 gathers them in."""
    for part in parts:
        for name, parameter in part.named_parameters():
            kind = {"codes": torch.uint8, "scales": torch.int32}.get(name.rpartition(".")[2])
            assert kind is None or (parameter.dtype is kind and not parameter.requires_grad), name
        for module in part.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
                for each in group.fsdp_params:
                    if each.sharded_param.dtype in (torch.uint8, torch.int32):
                        assert each.param_dtype is None


def each_in_turn(cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    return [gradients(case) for case in cases]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any number, relative to the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    return max((found[name] - grad).abs().max().item() for name, grad in expected.items()) / largest
