"""Distillation: the loss on any number of ranks, kills and resumption, refusals."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.compress.engine import CompressionRun, choose_model, evaluate_candidate, propose_model
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.loop.objective import Teacher
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.results.compression import CompressionTrial
from slipstream.shared.models.config import ModelConfig, TeachingConfig
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.trained import TrainedModel
from tests.support.training import SMALL, refusal, table_of_numbers, trained
from tests.support.wording import same_wording

ROWS = 257  # with a batch of 64 an epoch's tail is a single row: of two ranks one has none
SHORT = TrainingConfig(epochs=4, batch_size=64, patience=0)
LARGE = ModelConfig(arguments={"hidden": [32, 16]})
CLASSES = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
VALUES = Signature((TensorSpec("numeric", "float32", (5,)),), "regression", "y", target_std=2.0)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("data") / "prepared", ROWS)


@pytest.fixture(scope="module")
def teacher(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(prepared, tmp_path_factory.mktemp("teacher") / "x", 1, SHORT, LARGE)


def losses(model: Path) -> list[float]:
    return [point["loss"] for point in json.loads((model / "history.json").read_text())["steps"]]


def batch_of(inputs: torch.Tensor) -> Batch:
    return Batch((inputs,), torch.zeros(len(inputs)), len(inputs), len(inputs), 0, 0.0)


def test_the_loss_is_hintons() -> None:
    torch.manual_seed(0)
    inputs, outputs, weight = torch.randn(7, 5), torch.randn(7, 3), torch.rand(7)
    model = Predictor(CLASSES, torch.nn.Linear(5, 3)).eval()
    labels = torch.tensor(4.0)
    found = Teacher(model, TeachingConfig(weight=0.3, temperature=3.0), "fp32").blend(
        labels, outputs, batch_of(inputs), weight
    )
    expected = 0.7 * 4.0
    for row in range(7):
        p, q = (np.exp(x[row].detach().double().numpy() / 3) for x in (model(inputs), outputs))
        p, q = p / p.sum(), q / q.sum()
        expected += 0.3 * float(weight[row]) * 9 * sum(p * np.log(p / q))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_of_a_regression_it_is_the_squared_difference_in_units_of_the_variance() -> None:
    torch.manual_seed(0)
    inputs, outputs = torch.randn(7, 5), torch.randn(7, 1)
    model = Predictor(VALUES, torch.nn.Linear(5, 1)).eval()
    found = Teacher(model, TeachingConfig(weight=1.0), "fp32").blend(torch.tensor(9.0), outputs, batch_of(inputs), None)
    assert float(found) == pytest.approx(float(((model(inputs) - outputs) ** 2).sum() / 4), rel=1e-5)


@pytest.fixture(scope="module")
def taught(prepared: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(prepared, tmp_path_factory.mktemp("taught") / "x", 1, SHORT, teacher=teacher)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "accumulation"), [(2, 3), *(pytest.param(*each, marks=pytest.mark.prove) for each in ((2, 1), (1, 3)))]
)
def test_ranks_and_pieces_change_nothing_but_rounding(
    prepared: Path, teacher: Path, taught: Path, tmp_path: Path, world: int, accumulation: int
) -> None:
    pieces = dataclasses.replace(SHORT, accumulation=accumulation)
    other = trained(prepared, tmp_path / "other", world, pieces, teacher=teacher)
    for ours, theirs in zip(losses(taught), losses(other), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    left, right = (load_file(model / "last.safetensors") for model in (taught, other))
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=2e-4)


@pytest.mark.prove
def test_a_teacher_without_weight_changes_no_bit_and_one_with_weight_does(
    prepared: Path, teacher: Path, taught: Path, tmp_path: Path
) -> None:
    def weights(name: str, **more: Any) -> bytes:
        return (trained(prepared, tmp_path / name, 1, SHORT, **more) / "last.safetensors").read_bytes()

    without = weights("without")
    assert weights("silent", teacher=teacher, teaching=TeachingConfig(weight=0.0)) == without
    assert (taught / "last.safetensors").read_bytes() != without


@pytest.mark.prove
@pytest.mark.parametrize("pruned", [False, True])
def test_killed_and_resumed_it_ends_the_same(prepared: Path, teacher: Path, tmp_path: Path, *, pruned: bool) -> None:
    start = tmp_path / "start" if pruned else None
    if start:
        config = CompressionConfig(method="prune", share=0.5)
        propose_model(start, CompressionRun(TrainedModel.open(teacher), PreparedData.open(prepared), config), [], {})

    def job(name: str) -> TrainingJob:
        return TrainingJob(prepared, tmp_path / name, 2, str(tmp_path / name / "home"), teacher=teacher, start=start)

    whole, killed = job("whole"), job("killed")
    assert run_attempt(whole).finished
    for at in (8, 3):
        assert run_attempt(killed, InjectedFault("step", rank=1, at=at)).fired == 1
    assert run_attempt(killed).finished
    assert result_digests(killed) == result_digests(whole)
    assert "resumes from step" in (killed.place / "log-0").read_text()
    assert bool(TrainedModel.open(killed.output).architecture.retained) is pruned


@pytest.mark.prove
def test_training_goes_on_from_a_models_weights_and_its_checkpoints_belong_to_it(
    prepared: Path, teacher: Path, tmp_path: Path
) -> None:
    slow = dataclasses.replace(SHORT, learning_rate=1e-9)
    further = trained(prepared, tmp_path / "x", 1, slow, start=teacher)
    assert TrainedModel.open(further).config == TrainedModel.open(teacher).config != SMALL
    before, after = (
        load_file(model / f"{which}.safetensors") for model, which in ((teacher, "best"), (further, "last"))
    )
    for name in before:
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)
    assert math.isclose(losses(further)[0], losses(further)[-1], rel_tol=0.5)
    trained(prepared, tmp_path / "x", 1, slow, ModelConfig("mlp", LARGE.arguments))
    same_wording(refusal(tmp_path / "x", 0))


@pytest.mark.prove
def test_students_of_the_same_size_are_not_taken_for_each_other(prepared: Path, teacher: Path, tmp_path: Path) -> None:
    students = [{"hidden": [8], "dropout": dropout} for dropout in (0.1, 0.2)]
    config = CompressionConfig(method="distil", students=students, max_loss=100)
    work = CompressionRun(TrainedModel.open(teacher), PreparedData.open(prepared), config)
    models, tried = list[TrainedModel](), list[CompressionTrial]()
    for number in range(3):
        propose_model(tmp_path / str(number), work, tried, {})
        models.append(TrainedModel.open(tmp_path / str(number)))
        tried = evaluate_candidate(work, models[-1], 1.0, tried)
    assert [one.candidate for one in tried] == [0, 1] and tried[0].size == tried[1].size
    model, found = choose_model(work, models, tried)
    assert found.taken == "hidden 8, dropout 0.2" and model.config.arguments["dropout"] == 0.2


@pytest.mark.prove
def test_what_cannot_be_taught_is_refused_in_one_line(prepared: Path, teacher: Path, tmp_path: Path) -> None:
    sharded = dataclasses.replace(SHORT, parallel=ParallelConfig(shard="weights"))
    trained(prepared, tmp_path / "sharded", 2, sharded, teacher=teacher)
    same_wording(refusal(tmp_path / "sharded", 1))
    signature = dataclasses.replace(TrainedModel.open(teacher).signature, classes=("a", "b", "d"))
    other = other_model(tmp_path / "of-others", signature)
    trained(prepared, tmp_path / "other", 1, SHORT, teacher=other)
    same_wording(refusal(tmp_path / "other", 0))


def other_model(directory: Path, signature: Signature) -> Path:
    from slipstream.shared.models.factory import build_model
    from slipstream.shared.models.trained import Architecture, write_trained

    weights = build_model(SMALL, signature, seed=0).state_dict()
    write_trained(directory, Architecture(SMALL, signature), weights, weights, {})
    return directory
