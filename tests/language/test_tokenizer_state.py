"""Truncation, padding and dropout in a tokenizer.json do not change a document's ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer as Library

from slipstream.pipeline.export.hugging_face import main as hugging_face
from slipstream.pipeline.prepare.language import corpus
from slipstream.pipeline.prepare.resolve import given_tokenizer
from slipstream.shared.artifacts.prepared.token_rows import FAST, disable_padding_and_truncation, largest_id
from slipstream.shared.errors import UserError
from slipstream.shared.language.tokenizer import LearnedSpans, Tokenizer, TokenizerFiles, train_tokenizer
from tests.support.corpora import prepare_language, rows_of, story, write_lines, write_stories
from tests.support.proving import first_few
from tests.support.tokens import small_transformer, token_data, word_tokenizer
from tests.support.wording import refuses

TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 3,
    "pad_type_id": 0,
    "pad_token": "#",
}
STATES: dict[str, dict[str, Any]] = {
    "truncation": {"truncation": TRUNCATION},
    "truncation with overlap": {"truncation": {**TRUNCATION, "stride": 3, "direction": "Left"}},
    "fixed padding": {"padding": PADDING},
    "padding of a batch": {"padding": {**PADDING, "strategy": "BatchLongest", "pad_to_multiple_of": 8}},
    "dropout": {"dropout": 0.3},
    "all": {"truncation": TRUNCATION, "padding": PADDING, "dropout": 1.0},
}
TEXTS = [story(number) for number in range(20)]


@pytest.fixture(scope="module")
def clean() -> TokenizerFiles:
    return train_tokenizer([story(number) for number in range(100)], 400, turns=True)


def with_state(files: TokenizerFiles, state: dict[str, Any]) -> TokenizerFiles:
    content = json.loads(files[FAST]) | {name: value for name, value in state.items() if name != "dropout"}
    content["model"] |= {name: value for name, value in state.items() if name == "dropout"}
    return {**files, FAST: json.dumps(content, ensure_ascii=False)}


def write(directory: Path, files: TokenizerFiles) -> Path:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def ids_of(files: TokenizerFiles) -> list[list[int]]:
    return [ids.tolist() for ids in Tokenizer(files).documents(TEXTS)]


def ids_in_transformers(directory: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]


@pytest.mark.parametrize("name", first_few(STATES))
def test_ids_are_those_of_transformers_without_the_state(name: str, clean: TokenizerFiles, tmp_path: Path) -> None:
    changed = with_state(clean, STATES[name])
    raw = [encoded.ids for encoded in Library.from_str(changed[FAST]).encode_batch(TEXTS, add_special_tokens=False)]
    expected = ids_in_transformers(write(tmp_path / "clean", clean))
    assert raw != expected, "the library obeys the state"
    assert ids_of(changed) == ids_of(clean) == expected
    if "dropout" not in STATES[name]:
        assert ids_in_transformers(write(tmp_path / "changed", changed)) == expected, "transformers ignores it, too"


def test_transformers_keeps_dropout_and_what_is_stored_has_none(clean: TokenizerFiles, tmp_path: Path) -> None:
    changed = with_state(clean, {"dropout": 0.1})

    def encodings(directory: Path) -> int:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        return len({tuple(tokenizer(story(0))["input_ids"]) for _ in range(20)})

    assert encodings(write(tmp_path / "changed", changed)) > 1
    assert encodings(write(tmp_path / "stored", Tokenizer(changed).files)) == 1


@pytest.mark.parametrize("name", first_few(STATES))
def test_conversations_do_not_depend_on_it(name: str, clean: TokenizerFiles) -> None:
    text = "<|im_start|>user\nalpha beta<|im_end|>\n<|im_start|>assistant\ngamma delta epsilon<|im_end|>\n"
    spans = LearnedSpans([(text.index("gamma"), len(text))], marked=False)
    (expected,) = Tokenizer(clean).conversations([text], [spans])
    (found,) = Tokenizer(with_state(clean, STATES[name])).conversations([text], [spans])
    assert found.tolist() == expected.tolist()
    assert (found >= 0).any() and (found < 0).any()


@pytest.mark.parametrize("workers", first_few([1, 2]))
def test_prepared_data_has_every_token_once(
    workers: int, clean: TokenizerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_FILES", 20)  # only this process cuts pieces
    stories = write_stories(tmp_path / "stories")
    plain = prepare_language(tmp_path / "plain", stories, tokenizer=str(write(tmp_path / "clean", clean)))
    changed = write(tmp_path / "changed", with_state(clean, STATES["all"]))
    data = prepare_language(tmp_path / "data", stories, workers, tokenizer=str(changed))
    assert data.card["tokens"] == plain.card["tokens"]
    for split in ("train", "validation", "test"):
        assert (rows_of(data, split) == rows_of(plain, split)).all()
    stored = json.loads(data.artifact.read_bytes(f"tokenizer/{FAST}"))
    assert stored == json.loads(clean[FAST])


def test_prepared_conversations_are_not_cut(clean: TokenizerFiles, tmp_path: Path) -> None:
    template = {
        "chat_template.jinja": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    }
    rows = [{"prompt": f"alpha {n}", "completion": story(n)} for n in range(60)]
    lines = write_lines(tmp_path / "talks.jsonl", rows)
    found = [
        prepare_language(tmp_path / name, lines, tokenizer=str(write(tmp_path / f"{name}-files", files)), length=500)
        for name, files in (
            ("plain", {**clean, **template}),
            ("changed", with_state({**clean, **template}, STATES["all"])),
        )
    ]
    for split in ("train", "validation", "test"):
        assert (rows_of(found[0], split) == rows_of(found[1], split)).all()


def test_the_identity_is_that_of_the_reset_form(clean: TokenizerFiles, tmp_path: Path) -> None:
    changed, other = (with_state(clean, STATES[name]) for name in ("truncation", "all"))
    forms = [given_tokenizer(str(write(tmp_path / str(n), files))) for n, files in enumerate((changed, other))]
    assert forms[0] == forms[1]


def test_a_file_without_state_is_kept_byte_for_byte(clean: TokenizerFiles) -> None:
    indented = json.dumps(json.loads(clean[FAST]), indent=2)
    assert (
        disable_padding_and_truncation(indented) == indented
        and Tokenizer({**clean, FAST: indented}).files[FAST] == indented
    )
    lean = json.loads(clean[FAST])
    del lean["truncation"], lean["padding"], lean["model"]["dropout"]
    assert disable_padding_and_truncation(json.dumps(lean)) == json.dumps(lean)
    assert ids_of({**clean, FAST: json.dumps(lean)}) == ids_of(clean)


@pytest.mark.parametrize("last", first_few([None, TRUNCATION], 1))
def test_of_an_entry_that_is_given_twice_nothing_is_left(last: object, clean: TokenizerFiles) -> None:
    first = TRUNCATION if last is None else None
    twice = f'"truncation":{json.dumps(first)},"truncation":{json.dumps(last)}'
    text = clean[FAST].replace('"truncation":null', twice)
    assert text.count('"truncation":') == 2
    assert ids_of({**clean, FAST: text}) == ids_of(clean)


def test_what_is_copied_without_the_library_is_reset_too(tmp_path: Path) -> None:
    words = tmp_path / "words"
    word_tokenizer(48).save_pretrained(words)
    state = {"truncation": TRUNCATION, "padding": PADDING}
    content = json.loads((words / FAST).read_text())
    (words / FAST).write_text(json.dumps(content | state))
    data = token_data(tmp_path / "data", words)
    assert json.loads(data.artifact.read_bytes(f"tokenizer/{FAST}")) == content
    trained = small_transformer(tmp_path / "trained", data).directory
    arguments = [str(trained), str(tmp_path / "written"), "--tokenizer", str(words)]
    result = CliRunner().invoke(hugging_face, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "written" / FAST).read_text()) == content


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 100_000,
        '{"model": 3}',
        '{"model": {"vocab": {"a": -1}}}',
        '{"model": {"vocab": {"a": true}}}',
        '{"model": {"vocab": {"a": 1.5}}}',
    ],
)
def test_what_states_no_ids(text: str) -> None:
    with refuses(ValueError):
        largest_id(text)


def word_level(directory: Path, last: int) -> Path:
    vocabulary = {"</s>": 0, "alpha": last}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "</s>"}
    return write(directory, {FAST: json.dumps({"model": model}), "tokenizer_config.json": '{"eos_token": "</s>"}'})


def test_ids_are_bounded(tmp_path: Path) -> None:
    most = (1 << 24) - 1
    assert Tokenizer(given_tokenizer(str(word_level(tmp_path / "most", most)))[0]).vocabulary == 1 << 24
    for number in (most + 1, 4294967295):
        with refuses(UserError):
            given_tokenizer(str(word_level(tmp_path / str(number), number)))


def test_ids_have_embeddings_in_the_model_of_their_directory(tmp_path: Path) -> None:
    where = word_level(tmp_path / "base", 40)
    (where / "config.json").write_text('{"vocab_size": 41}')
    assert given_tokenizer(str(where))[1] == 41
    (where / "config.json").write_text('{"vocab_size": 40}')
    with refuses(UserError):
        given_tokenizer(str(where))


def test_no_texts_have_no_ids(clean: TokenizerFiles) -> None:
    assert Tokenizer(clean).documents([]) == []
    assert [ids.tolist() for ids in Tokenizer(clean).documents(["", "alpha", ""])][::2] == [[0, 0], [0, 0]]
    assert Tokenizer(clean).documents(["alpha"])[0].dtype == np.int64
