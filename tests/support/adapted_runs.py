"""Gradients of adapters under a layout, on real processes, and on one."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from slipstream.operations.proofs.gpu.layouts import whole
from slipstream.pipeline.train.parallel.compiled import recompute_blocks
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.adapters.network import hold_frozen
from slipstream.shared.models.arithmetic import autocast_context
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import Predictor, build_model, initial_values
from slipstream.shared.models.initial.drawn import InitialValues, draw_slice, fill_parameters
from tests.support.bases import LENGTH, SIGNATURE, some_tokens

#: Whole blocks of four-bit weights, and outputs that three processes cannot divide alike.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
LORA = LoraConfig(rank=3, alpha=6.0)
ROWS, SEED = 7, 5


#: How frozen weights are held.
Held = Literal["none", "nf4"]


@dataclass(frozen=True)
class Case:
    """A layout, and what is computed under it: ``double`` is float64 all through."""

    base: Path
    quantise: Held = "none"
    parallel: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 2
    precision: str = "fp32"
    recompute: bool = False
    #: Whether what is frozen is held in the type of bf16, as a training does.
    held: bool = True
    double: bool = False

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(base=str(self.base), lora=LORA, quantise=self.quantise)


@dataclass(frozen=True)
class Louder:
    """Other initial values: both factors of adapters have numbers that matter."""

    values: InitialValues

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        if is_adapter(name):
            draw_slice(part, name, size, offsets, std=0.3, seed=SEED)
        else:
            self.values.fill(part, name, size, offsets)


def predictor_of(case: Case) -> tuple[Predictor, InitialValues]:
    predictor = build_model(case.model, SIGNATURE, SEED, empty=True)
    values = Louder(initial_values(case.model, predictor.network, SEED, ModelOrigin(case.model)))
    if case.held:
        hold_frozen(predictor.network, case.precision)
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
    fill_parameters(predictor.network.to_empty(device="cpu"), values)
    rows = rows_of_batch()
    with autocast_context(case.precision, torch.device("cpu")):
        outputs = predictor(rows[:, :-1])
    losses(outputs, rows).mean().backward()
    return {name: p.grad.clone() for name, p in predictor.named_parameters() if p.grad is not None}


def gradients(case: Case) -> dict[str, Tensor]:
    """One rank's part of the same; the gradients, whole."""
    from slipstream.pipeline.train.loop.probe import ModelTraits
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model
    from slipstream.pipeline.train.parallel.layout import Layout, ParallelModel
    from slipstream.pipeline.train.parallel.replicas import replicate_model

    device, world = torch.device("cpu"), dist.get_world_size()
    layout = Layout.connect(ParallelConfig(**case.parallel), dist.get_rank(), world, device)
    place, places = layout.data_rank, layout.data_size
    each = math.ceil(math.ceil(ROWS / places) / case.accumulation)
    predictor, values = predictor_of(case)
    model: ParallelModel
    if layout.config.divides:
        size = {"micro_batches": case.accumulation, "rows": each}
        model = divide_model(predictor, layout, device, values, **size, precision=case.precision)
    else:
        fill_parameters(predictor.network.to_empty(device="cpu"), values)
        model = replicate_model(predictor, ModelTraits(), RankContext(layout.rank, world, device, "gloo"))
    check_bytes(values, layout)
    rows = rows_of_batch()
    mine = rows[place * ROWS // places : (place + 1) * ROWS // places]
    padded = torch.cat([mine, torch.zeros(case.accumulation * each - len(mine), LENGTH + 1, dtype=torch.long)])

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        of_rows = slice(first, first + len(outputs))
        real = torch.arange(len(padded))[of_rows] < len(mine)
        return (losses(outputs, padded[of_rows]) * real).sum() * places / ROWS

    pieces = [slice(start, start + each) for start in range(0, len(padded), each)]
    forward = partial(autocast_context, case.precision, device) if case.precision != "fp32" else nullcontext
    model.accumulate((padded[:, :-1],), pieces, loss_of, forward)
    check_types(model.model_parts)
    found = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
    assert all(map(is_adapter, found))
    return whole(found)


def check_bytes(values: InitialValues, layout: Any) -> None:
    """All processes that share a replica have read every byte of the base once, also of weights in four bits."""
    base = values.values.base.base  # type: ignore[attr-defined]
    read = torch.tensor(base.bytes_read)
    dist.all_reduce(read)
    stored = sum(4 * torch.Size(tensor.shape).numel() for tensor in base.tensors.values())
    replicas = layout.size("replicate") if layout.config.divides else dist.get_world_size()
    # Stages that share an embedding each read it.
    assert read == replicas * stored or layout.config.pipeline > 1, (int(read), replicas, stored)


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


class Kept(NamedTuple):
    """What autograd keeps between forward and backward pass: how many of the parts of four-bit weights and the bytes
    that they hold then, and whether it has any weight that was dequantised."""

    parts: int
    bytes_of_parts: int
    dequantised: bool


def kept_between_passes(case: Case) -> Kept:
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model
    from slipstream.pipeline.train.parallel.layout import Layout

    device = torch.device("cpu")
    layout = Layout.connect(ParallelConfig(**case.parallel), dist.get_rank(), dist.get_world_size(), device)
    predictor, values = predictor_of(case)
    shapes = {p.shape for p in build_model(replace(case.model, quantise="none"), SIGNATURE, 0, empty=True).parameters()}
    weights = {shape for shape in shapes if len(shape) == 2 and min(shape) > LORA.rank}
    model = divide_model(predictor, layout, device, values, micro_batches=1, rows=ROWS, precision="fp32")
    kept = list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = model.model(rows_of_batch()[:, :-1])
    parts = [tensor for tensor in kept if tensor.dtype in (torch.uint8, torch.int32)]
    others = [tensor for tensor in kept if tensor.is_floating_point() and tensor.untyped_storage().size()]
    found = Kept(
        len(parts), sum(part.untyped_storage().size() for part in parts), any(t.shape in weights for t in others)
    )
    outputs.sum().backward()
    return found


def each_in_turn(cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    return [gradients(case) for case in cases]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any number, relative to the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    return max((found[name] - grad).abs().max().item() for name, grad in expected.items()) / largest
