"""The student of choice is trained on the labels alone, too, and the better one is kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.compress.engine import (
    NO_TIME,
    CompressionRun,
    choose_model,
    evaluate_candidate,
    propose_model,
    untaught_candidate,
)
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.config import ModelConfig, TeachingConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.predict import model_function, predict_records, record_inputs, record_targets
from slipstream.shared.models.trained import Architecture, TrainedModel, write_trained
from tests.support.compression_trials import tried

CONFIG = CompressionConfig(method="distil", students=[{"hidden": [8]}], max_loss=100)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return write_table(tmp_path_factory.mktemp("table") / "data", "classification")


def fitted(directory: Path, data: PreparedData, hidden: int, steps: int) -> TrainedModel:
    """A network after some steps of plain torch."""
    config = ModelConfig("mlp", {"hidden": [hidden]})
    model = build_model(config, data.signature, seed=0)
    rows = data.split("train")
    inputs = [torch.from_numpy(each) for each in record_inputs(data.signature, rows)]
    targets = torch.from_numpy(record_targets(rows)).long()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(*inputs), targets).backward()
        optimizer.step()
    weights = model.state_dict()
    write_trained(directory, Architecture(config, data.signature), weights, weights, {})
    return TrainedModel.open(directory)


@pytest.fixture(scope="module")
def models(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedModel]:
    directory = tmp_path_factory.mktemp("models")
    steps = {"teacher": (16, 30), "good": (8, 30), "poor": (8, 1)}
    return {name: fitted(directory / name, data, *each) for name, each in steps.items()}


@pytest.mark.parametrize(("taught", "untaught", "kept"), [("poor", "good", "labels"), ("good", "poor", "teacher")])
def test_the_better_student_is_kept_with_the_difference_of_the_same_rows(
    taught: str, untaught: str, kept: str, models: dict[str, TrainedModel], data: PreparedData
) -> None:
    work = CompressionRun(models["teacher"], data, CONFIG)
    found = evaluate_candidate(work, models[taught], 1.0, [])
    model, result = choose_model(work, [models[taught], models[untaught]], found)
    rows = data.split("validation")
    right = {
        name: float(
            np.mean(
                predict_records(model_function(models[name].load()), data.signature, rows).argmax(axis=1)
                == record_targets(rows)
            )
        )
        for name in (taught, untaught)
    }
    assert result.teaching and result.teaching.kept == kept and model == models["good"]
    assert result.teaching.gain.value == pytest.approx(100 * (right[taught] - right[untaught]))
    assert result.teaching.gain.low < result.teaching.gain.value < result.teaching.gain.high
    assert result.teaching.rows == len(rows) and str(result.teaching) in result.why


def test_nothing_is_compared_without_time_a_teacher_or_a_student(
    models: dict[str, TrainedModel], data: PreparedData
) -> None:
    one = [tried(0, "passed", seconds=50)]
    assert untaught_candidate(one, replace(CONFIG, minutes=2)) == one[0]
    assert untaught_candidate(one, replace(CONFIG, minutes=1)) is None
    assert untaught_candidate(one, replace(CONFIG, teaching=TeachingConfig(weight=0.0))) is None
    assert untaught_candidate(one, CompressionConfig(method="prune", share=0.5)) is None
    several = replace(CONFIG, students=[{"hidden": [8]}, {"hidden": [4]}])
    assert untaught_candidate([tried(0, "failed"), tried(1, "failed")], several) is None
    assert untaught_candidate([tried(0, "passed"), tried(1, "failed")], several) == tried(0, "passed")
    work = CompressionRun(models["teacher"], data, replace(CONFIG, minutes=0.01))
    found = evaluate_candidate(work, models["poor"], 50.0, [])
    model, result = choose_model(work, [models["poor"], models["good"]], found)
    assert model == models["poor"] and result.teaching is None and result.why.endswith(NO_TIME)


def test_the_untaught_student_starts_from_the_same_weights(
    models: dict[str, TrainedModel], data: PreparedData, tmp_path: Path
) -> None:
    config = replace(CONFIG, students=[{"hidden": [8]}, {"hidden": [4]}, {"hidden": [2]}])
    work = CompressionRun(models["teacher"], data, config)
    propose_model(tmp_path / "first", work, [], {})
    found = [tried(1, "passed"), tried(2, "failed")]
    propose_model(tmp_path / "untaught", work, found, {}, untaught=True)
    assert TrainedModel.open(tmp_path / "untaught").config.arguments == {"hidden": [4]}
    first, again = (TrainedModel.open(tmp_path / name) for name in ("first", "untaught"))
    assert first.artifact.fingerprint == again.artifact.fingerprint
