"""What leaves as ``hugging-face/`` has its base's settings: configuration, end tokens, dtype and tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn import functional

from slipstream.pipeline.export import engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.artifacts.results.export import read_export
from slipstream.shared.models.adapters.network import merge_adapters
from slipstream.shared.models.base.directory import BaseDirectory, BaseRecord, ModelOrigin
from slipstream.shared.models.base.shape import shaped_for
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.hugging_face.files import without_code
from slipstream.shared.models.trained import Architecture, TrainedModel, write_trained
from tests.support.bases import LENGTH, VOCABULARY, make_base
from tests.support.proving import first_few

#: Id of the token in front of texts.
START = 257
CODE = {"AutoConfig": "code--own.Config", "AutoModelForCausalLM": "own.Model"}
#: The four families; tied and untied; with a window longer than a row, which later texts exceed.
FAMILIES: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("mistral", {"sliding_window": 32, "tie_word_embeddings": True}, torch.bfloat16),
    ("llama", {"bos_token_id": 1, "eos_token_id": [2, 258]}, torch.float32),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, torch.float32),
    ("qwen3", {"tie_word_embeddings": True}, torch.bfloat16),
]


#: Every pair of: a family with its sizes and dtype, adapters or all weights, and a token in front of texts or none.
MATRIX = [(each, lora, (number < 2) is lora) for number, each in enumerate(FAMILIES) for lora in (True, False)]


def write_base(directory: Path, family: str, changes: dict[str, Any], dtype: torch.dtype, starts: bool = False) -> Path:
    """Write a base whose files also name code, other forms of weights and places; texts have a start or none."""
    make_base(directory, family, dtype=dtype, **changes)
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    front = [("<|im_start|>", START)] if starts else []
    library.post_processor = TemplateProcessing(single="<|im_start|> $A" if starts else "$A", special_tokens=front)
    library.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text())
    config |= {"auto_map": CODE, "custom_pipelines": {"p": {"impl": "own.Pipeline"}}, "_name_or_path": "/home/me"}
    (directory / "config.json").write_text(json.dumps(config))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "model_max_length": 77}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": 7, "custom_generate": "own"}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def rows(directory: Path, tokenizer: Path) -> PreparedData:
    random = np.random.default_rng(0)
    splits = {name: random.integers(0, 250, (40, LENGTH + 1)) for name in ("train", "validation", "test")}
    return write_token_rows(directory, splits, VOCABULARY, tokenizer=tokenizer)


def take_five_steps(model: Predictor, data: PreparedData) -> None:
    tokens = torch.from_numpy(data.split("train")["tokens"][:].astype(np.int64))
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in learned]
    optimizer = torch.optim.AdamW(learned, lr=0.01)
    for _ in range(5):
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not any(map(torch.equal, before, learned))
    model.eval()


def fine_tuned(place: Path, base: Path, lora: bool) -> tuple[TrainedModel, PreparedData, Predictor]:
    """A trained model of the base as training leaves it, its data, and the model with merged weights."""
    data = rows(place / "data", base)
    given = ModelConfig(base=str(base), lora=LoraConfig(rank=4) if lora else LoraConfig())
    origin = ModelOrigin(given)
    config = shaped_for(given, data.signature, origin)
    model = build_model(config, data.signature, seed=0)
    take_five_steps(model, data)
    weights = model.own_state()
    architecture = Architecture(config, data.signature, base=BaseRecord(config.base, origin.base_digest))
    write_trained(place / "trained", architecture, weights, weights, {}, origin.base.inherited())
    merge_adapters(model.network)
    return TrainedModel.open(place / "trained"), data, model


@pytest.mark.parametrize(("family", "lora", "starts"), first_few(MATRIX, 2))
def test_what_is_exported_is_what_was_trained(
    family: tuple[str, dict[str, Any], torch.dtype], lora: bool, starts: bool, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", *family, starts)
    trained, data, model = fine_tuned(tmp_path, base, lora)
    engine.export(tmp_path / "exported", trained, data, ExportConfig(most_parameters=1), {})
    left, dtype = tmp_path / "exported/hugging-face", family[2]
    check_settings(base, left, family[1])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(left, dtype="auto").eval()
    assert loaded.dtype == dtype
    tokenizer = transformers.AutoTokenizer.from_pretrained(left)
    assert tokenizer("ab")["input_ids"] == [*([START] if starts else []), ord("a"), ord("b")]
    whole = {name: tensor.to(dtype) for name, tensor in model.network.state_dict().items()}
    stored = loaded.state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in whole.items())
    reference = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    reference.load_state_dict({name: tensor.float() for name, tensor in whole.items()}, strict=False)
    reference.tie_weights()
    tokens = torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(5))  # beyond the window
    if starts:
        tokens[:, 0] = START
    with torch.no_grad():
        ours, theirs = loaded.float()(tokens).logits, reference(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    if lora:
        check_adapter(base, tmp_path / "exported/adapter", trained.load(), tokens)
    greedy = [
        each.generate(tokens[:1, :20], max_new_tokens=32, do_sample=False, eos_token_id=-1, pad_token_id=0)
        for each in (loaded, reference)
    ]
    assert torch.equal(*greedy)
    allowed = [[3], [3], [3], [256], *[[3]] * 28]  # the tokenizer's end token is the fourth
    stopped = loaded.generate(
        tokens[:1, :20],
        max_new_tokens=32,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, ids: allowed[len(ids) - 20],
    )
    assert stopped[0, 20:].tolist() == [3, 3, 3, 256], "generation stops"


def check_adapter(base: Path, adapter: Path, model: Predictor, tokens: torch.Tensor) -> None:
    """Within a row, where windows do not matter, peft gives the model's logits."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(plain, adapter).eval()(tokens[:, :LENGTH]).logits
        expected = model(tokens[:, :LENGTH])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def check_settings(base: Path, left: Path, changes: dict[str, Any]) -> None:
    """Configuration files are the base's, without what names code, another form or a place."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        before, after = (json.loads((directory / name).read_text()) for directory in (base, left))
        assert "own" not in (left / name).read_text() and "/home/me" not in (left / name).read_text()
        eos = after.pop("eos_token_id", None)
        if name != "tokenizer_config.json":
            assert set(eos) >= {7, 256}, "the base's end token, and the tokenizer's"
        before = without_code(before)
        before.pop("eos_token_id", None)
        assert after == before
    config = json.loads((left / "config.json").read_text())
    assert {name: config[name] for name in changes if name != "eos_token_id"} == {
        name: value for name, value in changes.items() if name != "eos_token_id"
    }
    assert (left / "chat_template.jinja").read_bytes() == (base / "chat_template.jinja").read_bytes()


@pytest.mark.prove
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_measured_weights_have_the_dtype_that_is_exported(
    family: tuple[str, dict[str, Any], torch.dtype], tmp_path: Path
) -> None:
    import onnxruntime

    trained, data, model = fine_tuned(tmp_path, write_base(tmp_path / "base", *family), lora=True)
    engine.export(tmp_path / "exported", trained, data, ExportConfig(seconds=0.01, max_loss=0.0), {})
    assert read_export(tmp_path / "exported").chosen == "onnx-fp32"
    tokens = np.array(data.split("test")["tokens"][:4])
    session = onnxruntime.InferenceSession(tmp_path / "exported/model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: tokens})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(family[2]).float()
        expected = model(torch.from_numpy(tokens)).numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_dtype_is_chosen(tmp_path: Path) -> None:
    trained, data, _ = fine_tuned(tmp_path, write_base(tmp_path / "base", *FAMILIES[1]), lora=False)
    settings = ExportConfig(most_parameters=1, dtype="float16")
    engine.export(tmp_path / "exported", trained, data, settings, {})
    config = json.loads((tmp_path / "exported/hugging-face/config.json").read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported/hugging-face", dtype="auto")
    assert loaded.dtype == torch.float16 and "float16" in (config.get("dtype"), config.get("torch_dtype"))


def test_a_trained_model_of_an_older_release_has_no_settings_of_its_base(tmp_path: Path) -> None:
    trained, data, model = fine_tuned(tmp_path, write_base(tmp_path / "base", *FAMILIES[1]), lora=False)
    weights = model.own_state()
    write_trained(tmp_path / "older", trained.architecture, weights, weights, {})
    older = TrainedModel.open(tmp_path / "older")
    assert older.inherited == {} and set(trained.inherited) == {"config.json", "generation_config.json"}
    engine.export(tmp_path / "exported", older, data, ExportConfig(most_parameters=1), {})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported/hugging-face", dtype="auto")
    assert loaded.dtype == torch.float32


def test_no_entry_that_names_code_is_left_at_any_depth() -> None:
    deep = {"a": [{"auto_map": {}, "b": {"custom_x": 1, "kept": {"quantization_config": 2, "c": 3}}}]}
    assert without_code(deep) == {"a": [{"b": {"kept": {"c": 3}}}]}


def test_training_keeps_the_settings_of_its_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", *FAMILIES[0])
    writer = ArtifactWriter(tmp_path / "x")
    for name, content in BaseDirectory.list(str(base)).inherited().items():
        writer.write_bytes(name, content)
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "x/base").iterdir()}
    assert found == {name: json.loads((base / name).read_text()) for name in ("config.json", "generation_config.json")}
