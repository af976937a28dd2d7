"""Text from documents and conversations to the report; errors are one line."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import transformers
import yaml

from slipstream.config import RunConfig
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.language.chat_template import OWN_TEMPLATE
from tests.support.command_line import Run, one_message
from tests.support.corpora import own_tokenizer, write_lines, write_stories
from tests.support.quick_config import EXPORT, NETWORK

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {"task": "language", "tokenizer": "train", "vocabulary": 320, "length": 48}
QUICK = {
    "data": TEXT,
    "model": {"name": "transformer", "arguments": SIZES},
    "training": {"epochs": 2, "batch_size": 16, "learning_rate": 0.01},
    "export": {**EXPORT, "half": False},
    "collectives": NETWORK,
}


def test_the_example_is_a_configuration() -> None:
    found = RunConfig.from_json(json.dumps(yaml.safe_load((ROOT / "examples/text.yaml").read_text())))
    assert found.data.task == "language" and found.data.tokenizer == "train"


@pytest.mark.prove
def test_from_documents_to_the_report_and_what_transformers_reads(pyflyte_run: Run, tmp_path: Path) -> None:
    write_stories(tmp_path / "stories", 150)
    result = pyflyte_run("--data", "stories", "--config", json.dumps(QUICK))
    assert result.returncode == 0, result.stdout
    assert "150 documents read, 150 kept" in result.stdout and "test bits per byte" in result.stdout
    assert "Kneser-Ney, 5 bytes of context" in result.stdout and "with 95 % confidence" in result.stdout
    (run,) = (tmp_path / "runs").iterdir()
    page = (run / "report.html").read_text()
    assert "lzma after the training text: " in result.stdout and "lzma after the training text: " in page
    assert "Continuations of held-out documents" in page and "documents read" in page
    model = run / "model"
    rows = np.full((2, 48), -1, np.int16)
    (logits,) = onnxruntime.InferenceSession(model / "model.onnx").run(None, {"tokens": rows})
    assert logits.shape == (2, 48, 320)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model / "hugging-face")
    assert tokenizer.decode(tokenizer("story 3: alpha")["input_ids"]) == "<|endoftext|>story 3: alpha"
    config = transformers.AutoModelForCausalLM.from_pretrained(model / "hugging-face").config
    assert config.vocab_size == 320 and config.eos_token_id == config.bos_token_id == tokenizer.eos_token_id


@pytest.mark.prove
def test_from_conversations_to_the_report(pyflyte_run: Run, tmp_path: Path) -> None:
    rows = [{"prompt": f"after {n}?", "completion": f"{n + 1}." * (1 + n % 5)} for n in range(300)]
    write_lines(tmp_path / "asked.jsonl", rows)
    result = pyflyte_run("--data", "asked.jsonl", "--config", json.dumps(QUICK))
    assert result.returncode == 0, result.stdout
    assert "test bits per byte" in result.stdout
    (run,) = (tmp_path / "runs").iterdir()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model" / "hugging-face")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
    )
    assert asked == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("settings", "target", "expected"),
    [
        ({}, "y", "target: 'y' is not used, as data.task: language"),
        ({"tokenizer": "nowhere"}, "", "data.tokenizer: 'nowhere' is not a directory; expected train, bytes"),
        ({"length": 9999}, "", "data.length: the documents of the train split have"),
    ],
)
def test_bad_input_is_one_line(
    settings: dict[str, object], target: str, expected: str, pyflyte_run: Run, tmp_path: Path
) -> None:
    write_stories(tmp_path / "stories", 30)
    config = json.dumps({**QUICK, "data": {**TEXT, **settings}})
    result = pyflyte_run("--data", "stories", "--config", config, *(["--target", target] if target else []))
    assert result.returncode == 1
    assert expected in " ".join(one_message(result.stdout).split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.prove
def test_a_template_that_takes_all_memory_is_one_line(pyflyte_run: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "asked.jsonl", [{"prompt": f"after {n}?", "completion": f"{n + 1}."} for n in range(60)])
    takes = "{% if '31?' in messages[0].content %}{{ '%1000000000d' % 1 }}{% endif %}"
    own_tokenizer(tmp_path / "own", takes + OWN_TEMPLATE)
    config = json.dumps({**QUICK, "data": {**TEXT, "tokenizer": "own"}})
    result = pyflyte_run("--data", "asked.jsonl", "--config", config)
    assert result.returncode == 1
    message = " ".join(one_message(result.stdout).split())
    assert (
        "asked.jsonl, line 32: the chat template of data.tokenizer 'own' needed more than 512 MiB of memory" in message
    )
    assert not (tmp_path / "runs").exists()
