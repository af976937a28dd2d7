"""Export of a fine-tuned transformer: adapters that peft loads, and the whole model with merged adapters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import Tensor

from slipstream.pipeline.export import engine
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.hugging_face import main
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import LibraryFiles, read_export
from slipstream.shared.models.base.directory import BaseRecord
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.trained import Architecture, TrainedModel, write_trained
from tests.support.adapters import draw_adapters
from tests.support.bases import fingerprint_base, random_network, theirs
from tests.support.tokens import VOCABULARY, data_with_words
from tests.support.wording import same_wording

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128}
LORA = LoraConfig(3, alpha=5.0, targets=["q_proj", "v_proj", "down_proj"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return data_with_words(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The layers also have biases. Logits are so small that 1e-5 is more than rounding.
    directory, network = tmp_path_factory.mktemp("base"), random_network(attention_bias=True, mlp_bias=True, **SIZES)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.5)
    network.save_pretrained(directory)
    return directory


def adapted(config: ModelConfig, data: PreparedData) -> Predictor:
    """The base with adapters that matter."""
    model = build_model(config, data.signature, seed=0).eval()
    draw_adapters(model)
    return model


def rows_of(data: PreparedData) -> Tensor:
    return torch.from_numpy(np.array(data.split("test")["tokens"][:8]))


@pytest.fixture(scope="module")
def logits(base: Path, data: PreparedData) -> Tensor:
    """Of the model as it was trained."""
    with torch.no_grad():
        found: Tensor = adapted(ModelConfig(base=str(base), lora=LORA), data)(rows_of(data))
    assert (found - theirs(base, rows_of(data))).abs().max() > 0.1, "the adapters matter"
    return found


def exported(config: ModelConfig, data: PreparedData, directory: Path, **settings: Any) -> Path:
    """The export of a trained model, which holds its adapters alone."""
    adapters = adapted(config, data).own_state()
    architecture = Architecture(config, data.signature, base=BaseRecord(config.base, fingerprint_base(config.base)))
    write_trained(directory / "trained", architecture, adapters, adapters, {})
    trained, directory = TrainedModel.open(directory / "trained"), directory / "exported"
    engine.export(directory, trained, data, ExportConfig(seconds=0.01, **settings), {})
    check_package(directory)
    return directory


@pytest.fixture(scope="module")
def whole(base: Path, data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ModelConfig(base=str(base), lora=LORA)
    return exported(config, data, tmp_path_factory.mktemp("whole"), optimise="size")


def test_peft_loads_the_adapter_by_the_line_that_is_told(
    whole: Path, base: Path, data: PreparedData, logits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    adapter = read_export(whole).libraries[1]
    assert (adapter.name, adapter.base, adapter.rank, adapter.parts) == ("adapter", str(base), LORA.rank, 1)
    monkeypatch.chdir(whole)
    known = {"PeftModel": peft.PeftModel, "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    model = eval(adapter.loaded_by["peft"], known).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(rows_of(data)).logits, logits, rtol=0, atol=1e-5)
    config = json.loads((whole / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base), "as it was configured"
    assert peft.AutoPeftModelForCausalLM.from_pretrained(whole / "adapter")


def test_an_adapter_is_as_small_as_it_is(whole: Path) -> None:
    # Pairs of [rank, in] and [out, rank] in two blocks: heads of 16, two of them for keys and values.
    numbers = 2 * LORA.rank * ((64 + 64) + (64 + 32) + (128 + 64))
    content = (whole / "adapter/adapter_model.safetensors").read_bytes()
    assert len(content) == 8 + int.from_bytes(content[:8], "little") + 4 * numbers
    assert {path.name for path in (whole / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert read_export(whole).libraries[1].bytes == len(content)


def test_transformers_loads_what_was_merged(whole: Path, data: PreparedData, logits: Tensor) -> None:
    torch.testing.assert_close(theirs(whole / "hugging-face", rows_of(data)), logits, rtol=0, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(whole / "hugging-face")("w1 w40")["input_ids"] == [1, 40]


def test_the_command_writes_it_merged_too(whole: Path, data: PreparedData, logits: Tensor, tmp_path: Path) -> None:
    written = CliRunner().invoke(main, [str(whole.parent / "trained"), str(tmp_path / "out")], catch_exceptions=False)
    assert written.exit_code == 0, written.output
    torch.testing.assert_close(theirs(tmp_path / "out", rows_of(data)), logits, rtol=0, atol=1e-5)


def test_onnx_variants_are_of_what_was_merged(whole: Path, data: PreparedData, logits: Tensor) -> None:
    session = onnxruntime.InferenceSession(whole / "model.fp32.onnx")
    (found,) = session.run(None, {"tokens": rows_of(data).numpy()})
    assert np.abs(found - logits.numpy()).max() < 1e-4
    shapes = [list(tensor.dims) for tensor in onnx.load(whole / "model.fp32.onnx").graph.initializer]
    assert [128, 64] in shapes or [64, 128] in shapes
    assert not [shape for shape in shapes if len(shape) == 2 and LORA.rank in shape], "adapters were left"


def test_of_four_bits_a_whole_model_is_written(base: Path, data: PreparedData, tmp_path: Path) -> None:
    config = ModelConfig(base=str(base), lora=LORA, quantise="nf4")
    with torch.no_grad():
        expected = adapted(config, data)(rows_of(data))
    assert (expected - adapted(ModelConfig(base=str(base), lora=LORA), data)(rows_of(data))).abs().max() > 0.01
    count = sum(parameter.numel() for parameter in transformers.AutoModelForCausalLM.from_pretrained(base).parameters())
    out = exported(config, data, tmp_path, most_parameters=count - 1)
    same_wording(read_export(out).why)
    torch.testing.assert_close(theirs(out / "hugging-face", rows_of(data)), expected, rtol=0, atol=1e-5)
    assert (out / "adapter/adapter_model.safetensors").is_file() and not list(out.glob("*.onnx"))
    card = (out / "MODEL_CARD.md").read_text()
    assert "`adapter/` (1 file(s) of weights" in card and "PeftModel.from_pretrained(" in card
    assert "it was trained with the base's weights in four bits" in card and read_export(out).libraries[1].note
    assert not read_export(out).libraries[0].note


def test_the_lines_that_load_an_adapter() -> None:
    told = LibraryFiles("adapter", 1, 9, "s3://models/it's one", 17).loaded_by
    same_wording(told["vLLM"])
    assert told["peft"].startswith("PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(\"s3://models/it's")
    assert "vLLM" not in LibraryFiles("adapter", 1, 9, "base", 513).loaded_by, "it has no adapters so wide"
