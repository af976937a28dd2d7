"""transformers' own causal models: their blocks are found, and the documented factory trains them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import EXAMPLE_ROWS, to_onnx
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.plan import block_names
from slipstream.shared.models.trained import TrainedModel
from tests.support.corpora import prepare_language, write_stories
from tests.support.training import trained

FACTORY = "examples.causal_model:CausalModel"
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 8},
}
END = 256


def config_of(family: str) -> ModelConfig:
    return ModelConfig(FACTORY, {"model_type": family, **FAMILIES[family]})


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    place = tmp_path_factory.mktemp("stories")
    return prepare_language(place / "data", write_stories(place / "stories"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_are_the_layers_and_not_all_that_is_linear(family: str, stories: PreparedData) -> None:
    network = build_model(config_of(family), stories.signature, seed=0).network
    assert block_names(network) == tuple(f"model.model.layers.{number}" for number in range(3))


def test_linear_layers_are_the_blocks_of_a_model_that_has_no_others() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

    mostly_linear = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), Pair(), Pair())
    assert block_names(mostly_linear) == ("0", "1", "2", "3", "4", "5.inner", "6.inner")
    assert block_names(nn.Sequential(nn.Linear(999, 999), *(Pair() for _ in range(5)))) == ("1", "2", "3", "4", "5")


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_attend_to_themselves_alone(family: str) -> None:
    signature = Signature(
        (TensorSpec("tokens", "int16", (8,)),), "next token", "next token", buckets=END + 1, document_end=END
    )
    model = build_model(config_of(family), signature, seed=0).eval()
    one, other = ([1, 2, 3, END, 4, 5, 6, 7], [9, 8, 7, END, 4, 5, 6, 7])
    with torch.no_grad():
        ours, theirs = (model(torch.tensor([row], dtype=torch.int16)) for row in (one, other))
    torch.testing.assert_close(ours[0, 3:], theirs[0, 3:], atol=1e-6, rtol=0)
    assert not torch.allclose(ours[0, :3], theirs[0, :3])


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_exported(family: str, tmp_path: Path) -> None:
    signature = Signature(
        (TensorSpec("tokens", "int16", (8,)),), "next token", "next token", buckets=END + 1, document_end=END
    )
    model, draw = build_model(config_of(family), signature, seed=0).eval(), np.random.default_rng(0)
    example, rows = (draw.integers(0, END + 1, (count, 8)).astype(np.int16) for count in (EXAMPLE_ROWS, 5))
    rows[:, 4] = END
    to_onnx(model, signature, [example], ExportConfig().opset, tmp_path / "model.onnx")
    (found,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"tokens": rows})
    with torch.no_grad():
        np.testing.assert_allclose(found, model(torch.from_numpy(rows)).numpy(), atol=1e-4)


def test_the_page_shows_the_factory_as_it_is() -> None:
    source = (ROOT / "examples/causal_model.py").read_text()
    shown = source[source.index("class CausalModel") :].rstrip()
    assert shown in (ROOT / "docs/text.md").read_text()
    assert len(shown.splitlines()) <= 10


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_it_trains_as_on_one_process(family: str, stories: PreparedData, tmp_path: Path) -> None:
    weights, losses = [], []
    for world, parallel in ((1, {}), (2, {"shard": "weights"})):
        training = TrainingConfig.from_dict(
            {"epochs": 1, "batch_size": 16, "learning_rate": 0.01, "parallel": parallel}
        )
        made = trained(stories.artifact.directory, tmp_path / f"{world}", world, training, config_of(family))
        model = TrainedModel.open(made, FACTORY)
        weights.append(load_file(model.artifact.path("last.safetensors")))
        losses.append([point.loss for point in model.history.steps])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and losses[0][-1] < 0.8 * losses[0][0]
    assert weights[0].keys() == weights[1].keys()
