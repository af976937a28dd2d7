"""Training's arithmetic: one gradient for any ranks and micro-batches; precision, stopping, refusals."""

import gc
import json
import math
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.pipeline.train.checkpoint.shards import read_index
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop import state as state_module
from slipstream.pipeline.train.loop.optimizer import learning_rate
from slipstream.pipeline.train.loop.state import TrainingState
from slipstream.shared.artifacts.results.training import read_attempt, read_history
from tests.support.training import rank_body, refusal, table_of_numbers, trained
from tests.support.wording import same_wording

ROWS = 257  # with a batch of 64 an epoch's tail is a single row: of two ranks one has none


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("data") / "prepared", ROWS)


def history(model: Path) -> dict[str, Any]:
    return json.loads((model / "history.json").read_text())


@pytest.mark.parametrize(
    ("world", "accumulation"), [(2, 4), *(pytest.param(*each, marks=pytest.mark.prove) for each in ((2, 1), (1, 3)))]
)
def test_ranks_and_pieces_change_nothing_but_rounding(
    prepared: Path, tmp_path: Path, world: int, accumulation: int
) -> None:
    base = TrainingConfig(epochs=4, batch_size=64, patience=0)
    plain = trained(prepared, tmp_path / "plain", 1, base)
    other = trained(
        prepared,
        tmp_path / "other",
        world,
        TrainingConfig(epochs=4, batch_size=64, patience=0, accumulation=accumulation),
    )
    assert history(plain)["steps_total"] == 4 * math.ceil(ROWS / 64) == history(other)["steps_total"]
    for ours, theirs in zip(history(plain)["steps"], history(other)["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    left, right = (load_file(model / "last.safetensors") for model in (plain, other))
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=2e-4)


@pytest.mark.prove
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.prove)])
def test_mixed_precision_learns_and_keeps_full_precision_weights(
    prepared: Path, tmp_path: Path, precision: Literal["fp16", "bf16"]
) -> None:
    model = trained(prepared, tmp_path / precision, 1, TrainingConfig(epochs=6, batch_size=32, precision=precision))
    found = history(model)
    assert found["world"]["precision"] == precision
    assert found["best"]["accuracy"] > 0.6, "three classes, one standard deviation apart"
    assert 0 < read_attempt(model).save_seconds < 60, "a checkpoint is saved once an epoch"
    assert {weight.dtype for weight in load_file(model / "best.safetensors").values()} == {np.dtype("float32")}


def body_that_counts(rank: int, *arguments: Any) -> None:
    """Note how many weights this rank copies at every better evaluation."""
    stage = TrainingState.stage_best_weights
    file = Path(f"{arguments[2]['directory']}.copies{rank}")

    def counted(state: TrainingState) -> Callable[[], None]:
        with file.open("a") as copies:
            copies.write(f"{len(state.best_weights)}\n")
        return stage(state)

    vars(state_module)["TrainingState"].stage_best_weights = counted
    rank_body(rank, *arguments)


def test_only_rank_0_copies_and_stores_the_best_weights(prepared: Path, tmp_path: Path) -> None:
    config = TrainingConfig(epochs=2, batch_size=64, patience=0)
    model = trained(prepared, tmp_path / "x", 2, config, body=body_that_counts)
    ours, others = ((tmp_path / f"x/model.copies{rank}").read_text().split() for rank in range(2))
    assert set(ours) == {str(len(load_file(model / "best.safetensors")))} and set(others) == {"0"}
    assert len(ours) == len(others)
    index = read_index(next((tmp_path / "x/checkpoints").glob("step-*")))
    best = [tensor for name, tensor in index.items() if name.startswith("progress/best_weights/")]
    files = {chunk.piece.file for tensor in best for chunk in tensor.chunks}
    assert files == {"tensors-00000.bin"}


@pytest.mark.prove
def test_early_stopping_goes_by_evaluations_and_keeps_the_best_weights(prepared: Path, tmp_path: Path) -> None:
    config = TrainingConfig(epochs=60, batch_size=32, learning_rate=0.05, patience=3, warmup=0.0)
    found = history(trained(prepared, tmp_path / "x", 1, config))
    losses = [evaluation["loss"] for evaluation in found["evaluations"]]
    assert found["stopped_early"] and found["best"]["loss"] == min(losses)
    counting = [each for each in found["evaluations"] if each["step"] >= 200]
    assert losses.index(min(losses)) < len(losses) - 3 and len(counting) >= 3
    assert all(each["loss"] > found["best"]["loss"] for each in counting[-3:])
    assert len(counting) == 3 or counting[-4]["loss"] == found["best"]["loss"]


@pytest.mark.parametrize(("epochs", "ended"), [(8, "Too few steps"), pytest.param(20, "", marks=pytest.mark.prove)])
def test_patience_does_not_count_before_step_200(prepared: Path, tmp_path: Path, epochs: int, ended: str) -> None:
    """A rate at which hardly anything is learned: the loss falls a little, and evaluations repeat."""
    rate = 1e-4 if ended else 0.2
    config = TrainingConfig(epochs=epochs, batch_size=64, learning_rate=rate, patience=1, evaluate_every=2)
    model = trained(prepared, tmp_path / "x", 1, config)
    found = read_history(model)
    assert found.steps_total == epochs * math.ceil(ROWS / 64) < 200
    assert not found.stopped_early and found.ended.startswith(ended) and bool(found.ended) == bool(ended)


def test_a_loss_that_is_no_number_is_refused_by_every_rank_with_what_to_change(prepared: Path, tmp_path: Path) -> None:
    config = TrainingConfig(epochs=5, batch_size=64, learning_rate=1e30, clip_norm=0.0, warmup=0.0)
    trained(prepared, tmp_path / "x", 2, config)
    refusals = [refusal(tmp_path / "x", rank) for rank in range(2)]
    assert refusals[0] == refusals[1] and refusals[0].startswith("training.learning_rate:")
    same_wording(refusals[0])
    assert not (tmp_path / "x/model/manifest.json").exists()


def group_threads() -> list[str]:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name.startswith("pt_gloo")]


def outlived_by_a_reducer(port: int) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from slipstream.shared.distributed.process_group import process_group

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with process_group():
        ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
        ddp(torch.ones(1, 2)).sum().backward()
        assert group_threads()
    del ddp
    gc.collect()
    # Had the reducer been the last to hold the group, its destructor would have joined them, holding Python's lock.
    assert group_threads()


@pytest.mark.prove
def test_a_process_group_outlives_what_would_end_it_with_pythons_lock_in_hand() -> None:
    process = FORK.Process(target=outlived_by_a_reducer, args=(free_port(),), daemon=True)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(step, 100, 0.1, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.01 * (step + 1) for step in range(10)])
    assert max(rates) == rates[9] == rates[10] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(rates[10:])) and 0 < rates[99] < 1e-4
    assert learning_rate(55, 100, 0.1, 0.1) == pytest.approx(0.05)
