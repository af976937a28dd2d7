"""A step of a transformer never makes the host wait for a device, under any layout."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slipstream.operations.proofs.gpu.layouts import LENGTH, LayoutCase, set_up, token_rows
from slipstream.operations.proofs.gpu.waits import NoWaits
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch
from slipstream.shared.distributed.process_group import RankContext
from tests.support.layout_runs import on_ranks

ROWS = 6
#: By the number of processes: of the larger the scaled one, which has most to decide.
PRECISIONS = {2: ("fp32", "fp16", "bf16"), 4: ("fp16",)}
#: By the number of processes: layouts, and the decay of averaged weights.
LAYOUTS: dict[int, list[tuple[dict[str, object], float]]] = {
    2: [({}, 0.0), ({}, 0.9), ({"shard": "weights"}, 0.0), ({"shard": "optimizer"}, 0.0), ({"tensor": 2}, 0.0)],
    4: [({"shard": "weights", "tensor": 2}, 0.0)],
}


def two_steps(parallel: dict[str, object], ema: float, precision: str) -> float:
    """The loss of the second of two steps; the first may wait, as it makes what later ones use."""
    from slipstream.pipeline.train.loop import optimizer
    from slipstream.pipeline.train.loop.optimizer import AveragedWeights, make_optimizer
    from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState
    from slipstream.pipeline.train.loop.step import train_step

    optimizer.known_to_host = lambda tensor: False  # as on a GPU
    training = TrainingConfig(accumulation=2, clip_norm=0.1, ema=ema)
    layout, parallel_model, *_ = set_up(LayoutCase(dist.get_world_size(), parallel, accumulation=2, double=False))
    device = torch.device("cpu")
    state = TrainingState(
        parallel_model,
        make_optimizer(parallel_model.model, training),
        LossScaler(device, enabled=precision == "fp16"),
        {},
        Progress(),
        averaged=AveragedWeights(parallel_model.model, training.ema) if training.ema else None,
    )
    rows = token_rows(2 * ROWS)[layout.data_rank * ROWS : (layout.data_rank + 1) * ROWS]
    batch = Batch((rows[:, :LENGTH],), rows[:, 1:], ROWS, ROWS * layout.data_size, ROWS, 0.0)
    group = RankContext(layout.data_rank, layout.data_size, device, "gloo")
    train_step(state, training, group, precision, batch, 10)
    with NoWaits():
        result = train_step(state, training, group, precision, batch, 10)
    return sum(float(loss) for loss in result.losses)


def each_in_turn(world: int) -> list[float]:
    return [two_steps(*layout, precision) for layout in LAYOUTS[world] for precision in PRECISIONS[world]]


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_never_waits(world: int, tmp_path: Path) -> None:
    for losses in on_ranks(world, partial(each_in_turn, world), tmp_path):
        assert len(losses) == len(LAYOUTS[world]) * len(PRECISIONS[world]) and all(0 < loss < 100 for loss in losses)


def a_step_that_reads() -> None:
    with NoWaits():
        float(torch.ones(1))


def test_what_waits_is_found(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="makes the host wait"):
        on_ranks(1, a_step_that_reads, tmp_path)
