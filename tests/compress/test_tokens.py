"""Compression of transformers: pruned feed-forward layers or a shallower student."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.compress.engine import CompressionRun, choose_model, evaluate_candidate, propose_model
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.hugging_face.files import hugging_face_files
from slipstream.shared.models.pruning import prune_model
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.models.transformer import Transformer
from tests.support.corpora import prepare_language, write_lines
from tests.support.tokens import SIZES, small_transformer, token_data
from tests.support.toys import as_artifact
from tests.support.training import trained

SHORT = TrainingConfig(epochs=2, batch_size=64, patience=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return token_data(tmp_path_factory.mktemp("tokens") / "data")


@pytest.fixture(scope="module")
def whole(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    directory = tmp_path_factory.mktemp("whole") / "model"
    small_transformer(directory, data, steps=40)
    return TrainedModel.open(directory)


def made(work: CompressionRun, directory: Path) -> TrainedModel:
    propose_model(directory, work, [], {})
    return TrainedModel.open(directory)


@pytest.mark.prove
def test_feed_forward_units_are_pruned_and_taught_again(
    data: PreparedData, whole: TrainedModel, tmp_path: Path
) -> None:
    work = CompressionRun(whole, data, CompressionConfig(method="prune", share=0.5))
    start = made(work, tmp_path / "start")
    layers = [f"model.layers.{block}.mlp" for block in range(SIZES["num_hidden_layers"])]
    assert start.architecture.retained.keys() == {
        f"{layer}.{name}_proj" for layer in layers for name in ("gate", "up", "down")
    }
    directories: dict[str, Any] = {"start": start.artifact.directory, "teacher": whole.artifact.directory}
    fine_tuned = TrainedModel.open(trained(data.artifact.directory, tmp_path / "fine_tuned", 1, SHORT, **directories))
    model, found = choose_model(work, [fine_tuned], evaluate_candidate(work, fine_tuned, 1.0, []))
    assert model is fine_tuned and found.tried[0].size.units.count(24) == 4 and "accuracy over tokens" in found.why


def test_hugging_faces_library_loads_what_was_pruned(data: PreparedData, whole: TrainedModel, tmp_path: Path) -> None:
    smaller = made(CompressionRun(whole, data, CompressionConfig(method="prune", share=0.5)), tmp_path / "start").load()
    assert isinstance(smaller.network, Transformer)
    for name, content in hugging_face_files(smaller.network):
        (tmp_path / name).write_bytes(b"".join(content))
    rows = torch.from_numpy(np.array(data.split("test")["tokens"][:8]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (theirs(rows).logits - smaller(rows)).abs().max() < 1e-4
        prune_model(smaller.network, {"model.layers.0.mlp.gate_proj": {"out": [0, 1]}})
    assert not list(hugging_face_files(smaller.network)), "its layers have two sizes"


@pytest.mark.prove
def test_a_model_of_conversations_is_pruned_by_what_is_learned(tmp_path: Path) -> None:
    """Questions hold the letter c, whose stored form is torch's ignored label where it is not learned."""
    rows = [{"prompt": f"cc {number}?", "completion": f"{number} c"} for number in range(60)]
    path = write_lines(tmp_path / "talks.jsonl", rows)
    talks = prepare_language(tmp_path / "data", path, length=96)
    assert (talks.split("train")["target"] == -1 - ord("c")).any()
    directory = tmp_path / "model"
    config = ModelConfig("transformer", SIZES)
    network = build_model(config, talks.signature, seed=0)
    as_artifact(directory, config, talks, network.state_dict())
    work = CompressionRun(TrainedModel.open(directory), talks, CompressionConfig(method="prune", share=0.5))
    assert made(work, tmp_path / "start").architecture.retained


def test_a_student_may_be_shallower(data: PreparedData, whole: TrainedModel, tmp_path: Path) -> None:
    config = CompressionConfig(method="distil", students=[{"num_hidden_layers": 1}])
    student = made(CompressionRun(whole, data, config), tmp_path / "student")
    assert student.config.arguments == {**SIZES, "num_hidden_layers": 1}
