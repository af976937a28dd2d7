"""``training.parallel`` in a whole training: the same model under every layout, also with kills and changes of the
layout."""

import os
import signal
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
from safetensors.torch import load_file

from slipstream.operations.proofs.gpu.layouts import SIZES, token_rows
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.artifacts.results.training import History
from slipstream.shared.models.trained import TrainedModel
from tests.support.layout_runs import on_ranks

KILLED_AT = 8


@dataclass(frozen=True)
class Run:
    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 2
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False


RUNS = {
    "one process": Run(1),
    "none 2": Run(2),
    "weights 2": Run(2, {"shard": "weights"}),
    "weights 3": Run(3, {"shard": "weights"}),
    "hybrid 4": Run(4, {"shard": "weights", "replicas": 2}),
    "tensor 2": Run(2, {"tensor": 2}),
    "weights 2 x tensor 2": Run(4, {"shard": "weights", "tensor": 2}),
    "1f1b 2": Run(2, {"pipeline": 2}),
    "1f1b 2 x replicas 2": Run(4, {"pipeline": 2}),
    "interleaved 2": Run(2, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}, accumulation=4),
    "2 x 2 x 2": Run(8, {"pipeline": 2, "shard": "optimizer", "tensor": 2}),
}
RUNS["weights 2, offloaded"] = Run(2, {"shard": "weights", "offload": True})
RUNS |= {f"{name}, bf16": replace(run, precision="bf16") for name, run in RUNS.items()}
RUNS |= {f"{name}, compiled": replace(run, compile=True) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    rows = token_rows(300).numpy()
    place = tmp_path_factory.mktemp("data") / "prepared"
    return write_token_rows(place, {"train": rows[:100], "validation": rows[100:137]}, vocabulary=256)


def train(run: Run, prepared: Path, place: Path, home: str, killed: bool) -> None:
    """One rank of an attempt; if it is to be ``killed``, it ends in the midst of a step."""
    from slipstream.pipeline.train import run as engine
    from slipstream.pipeline.train.config import TrainingConfig
    from slipstream.pipeline.train.loop import train_loop
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.request import TrainingRequest
    from slipstream.shared.models.config import ModelConfig

    original = train_loop.train_step

    def step(state: Any, *rest: Any) -> Any:
        if killed and state.progress.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(state, *rest)

    train_loop.train_step = step  # type: ignore[assignment]
    engine.run_attempt(
        TrainingRequest(
            prepared=prepared,
            model=ModelConfig("transformer", {**SIZES, "tie_word_embeddings": True}),
            training=TrainingConfig(
                epochs=2,
                batch_size=12,
                accumulation=run.accumulation,
                checkpoint_every=3,
                evaluate_every=5,
                clip_norm=0.5,
                precision=run.precision,
                compile=run.compile,
                parallel=ParallelConfig(**run.parallel),
            ),
            directory=place,
            home=home,
            made_by={},
        )
    )


#: The weights, and the history.
Trained: TypeAlias = tuple[dict[str, Any], History]


def trained(name: str, prepared: PreparedData, place: Path, killed_as: str = "") -> Trained:
    """The weights and the history of a run, after an attempt as ``killed_as`` whose ranks were killed if there is."""
    home = str(place / "home")
    attempts = [(killed_as, True)] if killed_as else []
    for one, killed in [*attempts, (name, False)]:
        run, output = RUNS[one], place / ("killed" if killed else "trained")
        body = partial(train, run, prepared.artifact.directory, output, home, killed)
        on_ranks(run.world, body, place / f"{one}-{killed}", backend="", killed=killed)
    model = TrainedModel.open(place / "trained")
    return load_file(model.artifact.path("last.safetensors")), model.history


def check(name: str, prepared: PreparedData, place: Path, one: Trained) -> None:
    weights, history = trained(name, prepared, place)
    assert weights.keys() == one[0].keys()
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, one[0][key], rtol=0, atol=2e-5)
    for found, expected in zip(history.evaluations, one[1].evaluations, strict=True):
        assert found.loss == pytest.approx(expected.loss, abs=1e-5)
        assert found.accuracy == pytest.approx(expected.accuracy, abs=2e-3)
    assert [p.loss for p in history.steps] == pytest.approx([p.loss for p in one[1].steps], abs=1e-5)
    assert history.evaluations[-1].loss < history.evaluations[0].loss


@pytest.fixture(scope="module")
def one(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained("one process", prepared, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name", ["weights 2", pytest.param("1f1b 2", marks=pytest.mark.prove)])
def test_a_layout_trains_the_same_model(name: str, prepared: PreparedData, tmp_path: Path, one: Trained) -> None:
    check(name, prepared, tmp_path, one)


@pytest.mark.prove
@pytest.mark.parametrize(
    "name",
    [
        *("none 2", "tensor 2", "interleaved 2", "2 x 2 x 2"),
        *("none 2, compiled", "weights 2, compiled", "tensor 2, compiled", "1f1b 2, compiled"),
    ],
)
def test_every_layout_trains_the_same_model(name: str, prepared: PreparedData, tmp_path: Path, one: Trained) -> None:
    check(name, prepared, tmp_path, one)


@pytest.mark.prove
@pytest.mark.parametrize(
    "name",
    [
        *("weights 2", "weights 3", "hybrid 4", "tensor 2", "weights 2 x tensor 2"),
        *("1f1b 2", "1f1b 2 x replicas 2", "interleaved 2", "2 x 2 x 2"),
        *("none 2, compiled", "weights 2, compiled", "1f1b 2, compiled"),
    ],
)
def test_killed_and_resumed_is_bit_for_bit(name: str, prepared: PreparedData, tmp_path: Path) -> None:
    whole = trained(name, prepared, tmp_path / "whole")
    resumed = trained(name, prepared, tmp_path / "resumed", killed_as=name)
    assert all(torch.equal(resumed[0][key], tensor) for key, tensor in whole[0].items())
    assert resumed[1] == whole[1]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("killed_as", "name"),
    [("none 2", "1f1b 2"), ("1f1b 2", "weights 2"), ("tensor 2", "none 2"), ("2 x 2 x 2", "one process")],
)
def test_a_run_goes_on_under_another_layout(
    killed_as: str, name: str, prepared: PreparedData, tmp_path: Path, one: Trained
) -> None:
    weights, history = trained(name, prepared, tmp_path, killed_as=killed_as)
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, one[0][key], rtol=0, atol=2e-5)
    assert [p.loss for p in history.steps] == pytest.approx([p.loss for p in one[1].steps], abs=1e-5)


@pytest.fixture(scope="module")
def one_in_bf16(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained("one process, bf16", prepared, tmp_path_factory.mktemp("one"))


@pytest.mark.prove
@pytest.mark.parametrize(
    "name",
    [
        *("none 2", "weights 2", "weights 2, offloaded", "tensor 2", "1f1b 2", "interleaved 2", "2 x 2 x 2"),
        *("weights 2, bf16, compiled", "tensor 2, bf16, compiled"),
    ],
)
def test_every_layout_trains_in_bf16(
    name: str, prepared: PreparedData, tmp_path: Path, one: Trained, one_in_bf16: Trained
) -> None:
    weights, history = trained(name if "bf16" in name else f"{name}, bf16", prepared, tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for found, expected in zip(history.evaluations, one_in_bf16[1].evaluations, strict=True):
        assert found.loss == pytest.approx(expected.loss, abs=5e-3)
    # It is really other arithmetic.
    assert history.evaluations != one[1].evaluations and history.world.precision == "bf16"
