"""Documents start and end as transformers' tokenizer of the exported directory makes them, wherever they are used."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from slipstream.pipeline.evaluate.language import graded_documents
from slipstream.pipeline.export import engine, hugging_face
from slipstream.pipeline.export.card import BEHIND_THE_END
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.generate import prompt_ids
from slipstream.shared.artifacts.format import DamagedArtifact
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.documents import Document, read_documents
from slipstream.shared.artifacts.prepared.token_rows import NOT_LEARNED, read_tokens
from slipstream.shared.language.chat_template import OWN_TEMPLATE
from slipstream.shared.language.tokenizer import FAST, SETTINGS, TEMPLATE, bytes_tokenizer
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.hugging_face.files import hugging_face_files
from slipstream.shared.models.predict import model_function
from slipstream.shared.models.trained import Architecture, TrainedModel, write_trained
from slipstream.shared.models.transformer import Transformer
from tests.support.corpora import prepare_language, rows_of, write_lines, write_stories
from tests.support.proving import diagonal, first_few
from tests.support.wording import refuses

END, START, TURN_ENDS = 256, 257, 258
LENGTH = 1024
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
#: Text with the tokens around it in tokenizer.json ("": as tokenizers that are made here), and settings.
TOKENIZERS: dict[str, tuple[str, dict[str, object]]] = {
    "ours": ("", {}),
    "nothing": ("$A", {}),
    "a start": ("<|im_start|> $A", {}),
    "settings that add none": ("$A", {"add_bos_token": True, "bos_token": "<|im_start|>"}),
    "settings that remove none": ("<|im_start|> $A", {"add_bos_token": False}),
    "a start and an end": ("<|im_start|> $A <|endoftext|>", {}),
    "an end": ("$A <|endoftext|>", {}),
}


def write_tokenizer(directory: Path, around: str, settings: dict[str, object]) -> Path:
    """Write a tokenizer of the bytes with special tokens."""
    files = bytes_tokenizer(turns=True)
    if around:
        tokenizer = Library.from_str(files[FAST])
        known = [("<|endoftext|>", END), ("<|im_start|>", START)]
        used = [each for each in known if each[0] in around]
        tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=used)
        files[FAST] = tokenizer.to_str()
    files[SETTINGS] = json.dumps(json.loads(files[SETTINGS]) | settings)
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory


@pytest.fixture(params=first_few(TOKENIZERS, 3))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "own", *TOKENIZERS[request.param])
    write_stories(tmp_path / "stories")
    return tmp_path


def prepared(place: Path) -> PreparedData:
    own, split = str(place / "own"), {"validation": 0.2, "test": 0.2}
    return prepare_language(place / "data", place / "stories", tokenizer=own, length=LENGTH, shuffle=False, split=split)


def theirs(tokenizer: Any, text: str) -> list[int]:
    """The tokens of transformers, and the end token unless it is there."""
    ids = list(tokenizer(text)["input_ids"])
    return ids if ids[-1] == END else [*ids, END]


def after_the_end(ids: list[int]) -> list[int]:
    return ids if ids[0] in (START, END) else [END, *ids]


def bits(network: Any, ids: list[int]) -> float:
    with torch.no_grad():
        chances = network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float(-chances[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum() / math.log(2))


def test_training_evaluation_export_and_generation_have_one_form(place: Path) -> None:
    data = prepared(place)
    stored = place / "data/tokenizer"
    tokenizer = transformers.AutoTokenizer.from_pretrained(stored)
    documents = read_documents(data.artifact, "test")
    expected = [after_the_end(theirs(tokenizer, each.texts[0])) for each in documents]
    assert [each.tokens.tolist() for each in documents] == expected
    for each, ids in zip(documents, expected, strict=True):
        prompt = prompt_ids(tokenizer, each.texts[0], plain=True)
        assert prompt == ids[:-1]
    starts = theirs(tokenizer, "a")[0] == START
    nothing = theirs(tokenizer, "a")[0] == ord("a")
    assert data.signature.document_start == (START if starts else END)
    assert (BEHIND_THE_END in data.card["warnings"]) is nothing
    check_rows(data, documents, starts)

    model = build_model(ModelConfig("transformer", SIZES), data.signature, seed=0).eval()
    exported = place / "hugging-face"
    exported.mkdir()
    assert isinstance(model.network, Transformer)
    for name, content in hugging_face_files(model.network):
        (exported / name).write_bytes(b"".join(bytes(part) for part in content))
    network = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    found = graded_documents(model_function(model), data.signature, documents)
    assert found.bits == pytest.approx([bits(network, ids) for ids in expected], rel=1e-5)
    check_packed(data, model, network)


def stream(data: PreparedData, split: str) -> np.ndarray:
    rows = rows_of(data, split)
    return np.concatenate([rows[0, :1], rows[:, 1:].ravel()])


def check_rows(data: PreparedData, documents: list[Document], starts: bool) -> None:
    """Every token is a target once, but for the starts of documents, which only their first parts have."""
    tokens = stream(data, "test")
    ids, labels = read_tokens(tokens)
    whole = np.concatenate([each.tokens if starts else each.tokens[1:] for each in documents])
    expected = np.concatenate([[END], whole])[: len(tokens)]
    assert ids.tolist() == expected.tolist()
    assert ((labels == NOT_LEARNED) == (ids == START)).all() if starts else (labels == ids).all()
    rows = np.concatenate([rows_of(data, "train")])
    if starts:
        assert data.signature.learned == pytest.approx((rows[:, 1:] >= 0).sum() / len(rows), rel=0.01)
    else:
        assert data.signature.learned == 0


def check_packed(data: PreparedData, model: Any, network: Any) -> None:
    """In a packed row a document gets the logits that transformers gives to it alone."""
    row, _ = read_tokens(rows_of(data, "train")[0])
    begins = np.flatnonzero(row[:-1] == data.signature.document_start)
    first, last = begins[1], begins[2]
    with torch.no_grad():
        ours = model(torch.from_numpy(row[None, :-1]))[0, first:last]
        alone = network(torch.from_numpy(row[None, first:last])).logits[0]
    assert ours.numpy() == pytest.approx(alone.numpy(), abs=1e-5)


@pytest.mark.parametrize(("conversations", "around"), diagonal([False, True], ["$A", "<|im_start|> $A"]))
def test_the_package_states_where_texts_start_and_end(around: str, conversations: bool, tmp_path: Path) -> None:
    own = write_tokenizer(tmp_path / "own", around, {})
    (own / TEMPLATE).write_text(OWN_TEMPLATE)
    rows: list[Any] = [{"prompt": f"after {n}?", "completion": f"{n + 1}."} for n in range(60)]
    source = write_lines(tmp_path / "t.jsonl", rows) if conversations else write_stories(tmp_path / "stories")
    data = prepare_language(tmp_path / "data", source, tokenizer=str(own), length=64, across_documents=True)
    config = ModelConfig("transformer", SIZES)
    weights = build_model(config, data.signature, seed=0).state_dict()
    write_trained(tmp_path / "trained", Architecture(config, data.signature), weights, weights, {})
    trained = TrainedModel.open(tmp_path / "trained")
    engine.export(tmp_path / "exported", trained, data, ExportConfig(most_parameters=1), {})
    stated = json.loads((tmp_path / "exported/hugging-face/config.json").read_text())["eos_token_id"]
    assert stated == ([TURN_ENDS, END] if conversations else END)
    card = (tmp_path / "exported/MODEL_CARD.md").read_text()
    sentence = "the first token of a document is learned and evaluated behind the end token"
    assert (sentence in " ".join(card.split())) is (around == "$A" and not conversations)
    command = [str(tmp_path / "trained"), str(tmp_path / "out"), "--tokenizer", str(own)]
    assert CliRunner().invoke(hugging_face.main, command, catch_exceptions=False).exit_code == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == stated


def test_rows_of_an_earlier_format_are_refused(tmp_path: Path) -> None:
    data = prepare_language(tmp_path / "data", write_stories(tmp_path / "stories"))
    assert data.signature.row_format == 2
    with pytest.MonkeyPatch.context() as patch, refuses(DamagedArtifact):
        patch.setattr("slipstream.shared.artifacts.prepared.data.ROW_FORMAT", 3)
        PreparedData.open(tmp_path / "data")
