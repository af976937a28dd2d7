"""Cost of the ZeRO levels: the collectives of one step, counted."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.operations.proofs.gpu.layouts import LENGTH, SEED, SIZES, LayoutCase, model_of, row_losses, token_rows
from slipstream.shared.models.arithmetic import autocast_context
from slipstream.shared.models.initial.drawn import DrawnValues
from tests.support.layout_runs import on_ranks
from tests.support.proving import first_few

MICRO_BATCHES = 3
#: Of a step: how often weights are gathered and gradients reduced.
COUNTS = {"optimizer": (5, 5), "gradients": (15, 15), "weights": (30, 15)}
#: Of a number.
BYTES = {"fp32": 4, "bf16": 2}


class Collectives(TorchDispatchMode):
    """Counts the collectives of the block, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace.startswith(("c10d", "_c10d")):
            name = operator._schema.name.partition("::")[2]
            self.counts[name] += 1
            self.bytes[name] += sum(tensor.nbytes for tensor in tree_leaves(args) if isinstance(tensor, Tensor))
        return operator(*args, **(kwargs or {}))


def sharded(shard: str, precision: str = "fp32") -> Any:
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model
    from slipstream.pipeline.train.parallel.layout import Layout

    device = torch.device("cpu")
    layout = Layout.connect(ParallelConfig(shard=shard), dist.get_rank(), 2, device)  # type: ignore[arg-type]
    model = model_of(LayoutCase(2, {}, double=False), empty=True)
    return divide_model(
        model,
        layout,
        device,
        DrawnValues(model.network, SEED),
        micro_batches=MICRO_BATCHES,
        rows=2,
        precision=precision,
    )


def count(shard: str) -> dict[str, int]:
    """The collectives of the second step under this sharding, by kind."""
    model = sharded(shard)
    rows = token_rows(2 * MICRO_BATCHES)
    pieces = [slice(start, start + 2) for start in range(0, len(rows), 2)]

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        return row_losses(outputs, rows[first : first + 2]).sum()

    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.1)
    for _ in range(2):
        with Collectives() as collectives:
            model.accumulate((rows[:, :LENGTH],), pieces, loss_of)
            optimizer.step()
            optimizer.zero_grad()
    return dict(collectives.counts)


def saved_weights(shard: str) -> tuple[int, int, set[torch.dtype]]:
    """The bytes of the blocks' weights that a bf16 forward pass leaves for the backward pass in any type, those of all
    their weights in bf16, and the types of the gradients."""
    model = sharded(shard, "bf16")
    blocks = [p for name, p in model.model.named_parameters() if ".layers." in name and p.ndim == 2]
    shapes = {tuple(p.shape) for p in blocks} | {tuple(p.shape[::-1]) for p in blocks}
    rows, kept, left = token_rows(2), {}, []

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        left.append(sum(storage.size() for storage in kept.values()))
        return row_losses(outputs.float(), rows).sum()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.accumulate(
            (rows[:, :LENGTH],), [slice(0, 2)], loss_of, partial(autocast_context, "bf16", torch.device("cpu"))
        )
    return left[0], sum(2 * p.numel() for p in blocks), {p.grad.dtype for p in model.model.parameters()}


def sent_between_stages(precision: str) -> int:
    """The bytes that this stage of two sends in the second step; in the first torch connects them."""
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model
    from slipstream.pipeline.train.parallel.layout import Layout

    device, rows = torch.device("cpu"), token_rows(2 * MICRO_BATCHES)
    layout = Layout.connect(ParallelConfig(pipeline=2), dist.get_rank(), 2, device)
    part = model_of(LayoutCase(2, {}, double=False), empty=True)
    model = divide_model(
        part, layout, device, DrawnValues(part.network, SEED), micro_batches=MICRO_BATCHES, rows=2, precision=precision
    )
    pieces = [slice(start, start + 2) for start in range(0, len(rows), 2)]

    def loss_of(outputs: Tensor, first: int) -> Tensor:
        return row_losses(outputs.float(), rows[first : first + 2]).sum()

    for _ in range(2):
        with Collectives() as collectives:
            model.accumulate((rows[:, :LENGTH],), pieces, loss_of, partial(autocast_context, precision, device))
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.model.parameters())
    return collectives.bytes["send"]


Found = dict[tuple[str, str], Any]


def everything() -> Found:
    found: Found = {("count", shard): count(shard) for shard in COUNTS}
    found |= {("saved", shard): saved_weights(shard) for shard in ("gradients", "weights")}
    return found | {("sent", precision): sent_between_stages(precision) for precision in BYTES}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two ranks counted, in one group."""
    return on_ranks(2, everything, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("shard", first_few(["gradients", "weights"], 1))
def test_in_bf16_no_copy_of_a_sharded_weight_outlives_its_block(shard: str, found: list[Found]) -> None:
    for left, whole, gradients in (of_rank["saved", shard] for of_rank in found):
        assert left == (0 if shard == "weights" else whole) and gradients == {torch.float32}


@pytest.mark.parametrize("shard", COUNTS)
def test_collectives_of_a_step(shard: str, found: list[Found]) -> None:
    """Four blocks and the rest are five groups of parameters; a step has three micro-batches."""
    gathers, reductions = COUNTS[shard]
    for of_rank in found:
        assert of_rank["count", shard] == {"_allgather_base_": gathers, "_reduce_scatter_base_": reductions}


@pytest.mark.parametrize("precision", BYTES)
def test_stages_send_what_they_compute_in(precision: str, found: list[Found]) -> None:
    """Hidden states one way, their gradients the other."""
    sent = MICRO_BATCHES * 2 * LENGTH * SIZES["hidden_size"] * BYTES[precision]
    assert [of_rank["sent", precision] for of_rank in found] == [sent] * 2
