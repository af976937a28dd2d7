"""Fine-tuning of a base from one command to its report; errors are one line."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import peft
import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from slipstream.config import RunConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.documents import read_documents
from slipstream.shared.artifacts.results.evaluation import Evaluation, read_evaluation
from slipstream.shared.artifacts.versions import ROOT
from tests.support.bases import fingerprint_base, make_base
from tests.support.command_line import Run, one_message
from tests.support.corpora import WORDS, write_lines, write_stories
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.untrusted import make_secret, replace_by_link

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPORTED = {**EXPORT, "half": False}
BASE = {
    "data": {"task": "language", "vocabulary": 320, "length": 48},
    "model": {"name": "transformer", "arguments": SIZES},
    "training": {"epochs": 4, "batch_size": 16, "learning_rate": 0.01},
    "export": EXPORTED,
    "collectives": NETWORK,
}
TUNED = {
    "data": {"length": 48},
    "model": {"lora": {"rank": 8, "alpha": 16, "dropout": 0.1}, "quantise": "nf4"},
    "training": {"epochs": 3, "batch_size": 16, "learning_rate": 0.01, "weight_decay": 0, "recompute": "full"},
    "export": EXPORTED,
    "collectives": NETWORK,
}

ADAPTERS = {"lora": {"rank": 4}}


def test_the_example_is_a_configuration() -> None:
    found = RunConfig.from_json(json.dumps(yaml.safe_load((ROOT / "examples/fine_tuning.yaml").read_text())))
    assert found.model.lora.rank == 16 and not found.model.base


def backwards(count: int) -> list[dict[str, str]]:
    """Texts of the same words by another rule."""
    draw, rows = np.random.default_rng(7), []
    for number in range(count):
        place, words = int(draw.integers(len(WORDS))), [f"story {number}:"]
        for step in draw.integers(1, 3, int(draw.integers(20, 80))).tolist():
            place = (place - step) % len(WORDS)
            words.append(WORDS[place])
        rows.append({"text": " ".join(words) + ".\n"})
    return rows


@pytest.mark.prove
def test_adapters_of_a_base_are_better_than_it_on_other_text(pyflyte_run: Run, tmp_path: Path) -> None:
    """The base is trained here, too, by the main job, and its files are as they were afterwards."""
    write_stories(tmp_path / "stories", 150)
    first = pyflyte_run("--data", "stories", "--config", json.dumps(BASE))
    assert first.returncode == 0, first.stdout
    (run,) = (tmp_path / "runs").iterdir()
    base = run / "model/hugging-face"
    before = fingerprint_base(str(base))
    write_lines(tmp_path / "other.jsonl", backwards(200))
    asked = ("--base", str(base), "--data", "other.jsonl", "--config", json.dumps(TUNED))
    result = pyflyte_run(*asked, workflow="fine_tune")
    assert result.returncode == 0, result.stdout
    assert "(the base: " in result.stdout and "with 95 % confidence" in result.stdout
    assert fingerprint_base(str(base)) == before, "the base is untouched"
    (tuned,) = (path for path in (tmp_path / "runs").iterdir() if path != run)
    (evaluated,) = (
        found
        for path in (tmp_path / ".slipstream/evaluate").iterdir()
        if (found := read_evaluation(path)).baseline.name == "the base"
    )
    assert evaluated.gain.low > 0, evaluated.gain
    page = (tuned / "report.html").read_text()
    assert "the base" in page and "adapter/" in page
    check_that_others_load_it(tuned / "model", base, evaluated)
    assert trained_bytes(tmp_path) < 0.3 * (base / "model.safetensors").stat().st_size
    again = pyflyte_run(*asked, workflow="fine_tune")
    made = r"^(prepare|train|export) +[\d.]+ s  \.slipstream"
    assert re.findall(made, result.stdout, re.M) == ["prepare", "train", "export"], result.stdout
    assert not re.search(made, again.stdout, re.M), again.stdout
    assert again.returncode == 0 and "(the base: " in again.stdout


def check_that_others_load_it(model: Path, base: Path, evaluated: Evaluation) -> None:
    """peft, transformers and ONNX Runtime give the same logits, of the base in four bits with its adapters."""
    tokens = torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        merged = transformers.AutoModelForCausalLM.from_pretrained(model / "hugging-face").eval()(tokens).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
        adapted = peft.PeftModel.from_pretrained(plain, model / "adapter").eval()(tokens).logits
    session = onnxruntime.InferenceSession(model / "model.fp32.onnx")
    (exported,) = session.run(None, {"tokens": tokens.to(torch.int16).numpy()})
    assert exported == pytest.approx(merged.numpy(), abs=1e-4)
    # peft adds the adapters to the base in its own precision, not in four bits.
    near, far = (float((adapted - other).abs().mean()) for other in (merged, torch.zeros(())))
    assert near < 0.2 * far, (near, far)


@pytest.mark.prove
@pytest.mark.parametrize("around", ["<|im_start|> $A", "$A"])
def test_the_reported_gain_is_that_of_transformers(around: str, pyflyte_run: Run, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", max_position_embeddings=512)
    library = Tokenizer.from_file(str(base / "tokenizer.json"))
    library.post_processor = TemplateProcessing(
        single=around, special_tokens=[("<|im_start|>", 257)] if "im_start" in around else []
    )
    library.save(str(base / "tokenizer.json"))
    write_lines(tmp_path / "other.jsonl", backwards(120))
    settings = {**TUNED, "data": {"length": 512}, "model": ADAPTERS, "export": {**EXPORTED, "most_parameters": 1}}
    asked = ("--base", "base", "--data", "other.jsonl", "--config", json.dumps(settings))
    result = pyflyte_run(*asked, workflow="fine_tune")
    assert result.returncode == 0, result.stdout
    (tuned,) = (tmp_path / "runs").iterdir()
    (evaluated,) = (tmp_path / ".slipstream/evaluate").iterdir()
    (data,) = (tmp_path / ".slipstream/prepare").iterdir()
    texts = [each.texts[0] for each in read_documents(PreparedData.open(data).artifact, "test")]
    before, after = (bits_per_byte(directory, texts) for directory in (base, tuned / "model/hugging-face"))
    found = read_evaluation(evaluated)
    assert found.gain.value > 0.5 and found.gain.value == pytest.approx(before - after, abs=1e-4)
    assert found.baseline.bits_per_byte == pytest.approx(before, abs=1e-4)


def bits_per_byte(directory: Path, texts: list[str]) -> float:
    """Of documents as transformers reads them, between end tokens unless they have a start."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    nats, end = 0.0, tokenizer.eos_token_id
    for text in texts:
        ids = [*tokenizer(text)["input_ids"], end]
        ids = ids if ids[0] == 257 else [end, *ids]
        with torch.no_grad():
            chances = network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        nats -= float(chances[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum())
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def trained_bytes(directory: Path) -> int:
    """Of the best weights of the training that trained adapters: those alone."""
    return min(path.stat().st_size for path in directory.glob(".slipstream/train/*/best.safetensors"))


@pytest.mark.parametrize(
    ("base", "settings", "expected"),
    [
        ("nowhere", {}, "model.base: nowhere: no such directory, and no model of this name in Hugging Face's cache"),
        (
            "base",
            {"model": {"lora": {"rank": None}, "quantise": "nf4"}},
            'model.quantise: "nf4" is not allowed; expected null, or a',
        ),
        ("base", {"data": {"length": 512}}, "has positions for 64 tokens, and a row has 512"),
        ("base", {"model": {**ADAPTERS, "quantise": "nf4"}}, "which is not a multiple of 64"),
        ("base", {"model": {"base": "other"}}, "model.base: other conflicts with --base base"),
        (
            "base",
            {"model": {"lora": {"rank": 4}}, "training": {"parallel": {"tensor": 2}}},
            "the adapters of model.lora cannot be divided",
        ),
        (
            "base",
            {"model": {"lora": {"rank": 17}}},
            "model.lora.rank: 17 is not allowed; expected at most 16",
        ),
        ("", {}, "--base: is empty; expected a directory"),
    ],
)
def test_what_cannot_be_is_one_line(
    base: str, settings: dict[str, object], expected: str, pyflyte_run: Run, tmp_path: Path
) -> None:
    write_stories(tmp_path / "stories", 40)
    make_base(tmp_path / "base")
    config = json.dumps({**TUNED, "model": {}, **settings})
    result = pyflyte_run("--base", base, "--data", "stories", "--config", config, workflow="fine_tune")
    assert result.returncode == 1
    assert expected in " ".join(one_message(result.stdout).split()), result.stdout
    assert not (tmp_path / ".slipstream/prepare").exists(), "before the work begins"
    assert not (tmp_path / "runs").exists()


def with_an_added_token(base: Path) -> None:
    content = json.loads((base / "tokenizer.json").read_text())
    number = json.loads((base / "config.json").read_text())["vocab_size"]
    content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": "<pad>"})
    (base / "tokenizer.json").write_text(json.dumps(content))


def of_bitsandbytes(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    stored = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (base / "config.json").write_text(json.dumps({**config, **stored}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            with_an_added_token,
            "has the token '<pad>' with the id 259, and the model of config.json has embeddings for",
        ),
        (of_bitsandbytes, "quantization_config: the weights are stored in another form (bitsandbytes)"),
    ],
)
def test_a_base_that_cannot_be_trained_is_refused_with_the_cause(
    change: Callable[[Path], None], expected: str, pyflyte_run: Run, tmp_path: Path
) -> None:
    write_stories(tmp_path / "stories", 40)
    change(make_base(tmp_path / "base", vocab_size=259))
    config = json.dumps({**TUNED, "model": {}})
    result = pyflyte_run("--base", "base", "--data", "stories", "--config", config, workflow="fine_tune")
    assert result.returncode == 1
    assert expected in " ".join(one_message(result.stdout).split()), result.stdout
    assert not (tmp_path / ".slipstream/prepare").exists() and not (tmp_path / "runs").exists()


def test_adapters_want_a_base(pyflyte_run: Run, tmp_path: Path) -> None:
    write_stories(tmp_path / "stories", 40)
    config = json.dumps({**BASE, "model": {"name": "transformer", "arguments": SIZES, "lora": {"rank": 4}}})
    result = pyflyte_run("--data", "stories", "--config", config)
    assert result.returncode == 1
    assert "model.lora.rank: 4 is not allowed; expected null, or a model.base" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_base_with_a_link_that_leads_out_is_one_line(name: str, pyflyte_run: Run, tmp_path: Path) -> None:
    write_stories(tmp_path / "stories", 40)
    base, secret = make_base(tmp_path / "base"), make_secret(tmp_path)
    replace_by_link(base / name, secret)
    result = pyflyte_run(
        "--base", "base", "--data", "stories", "--config", json.dumps({**TUNED, "model": {}}), workflow="fine_tune"
    )
    assert result.returncode == 1
    assert f"base/{name}: leads to {secret}, outside of {base}" in " ".join(one_message(result.stdout).split())
    assert not (tmp_path / "runs").exists() and not (tmp_path / ".slipstream/prepare").exists()
