"""Tokenizers that panic, hang or exhaust memory end in one line, in workers too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from slipstream.pipeline.prepare.language import corpus
from slipstream.shared.artifacts.prepared.token_rows import FAST
from slipstream.shared.artifacts.versions import ROOT, cached_syntax
from slipstream.shared.errors import UserError
from slipstream.shared.language import engine
from slipstream.shared.language.tokenizer import SETTINGS, TEMPLATE, Tokenizer, TokenizerFiles, bytes_tokenizer
from tests.support.corpora import prepare_language, story, write_lines, write_stories
from tests.support.proving import first_few
from tests.support.wording import refuses

LINE = "data.tokenizer: tokenizer.json: the library tokenizers fails with it: "
BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
EMPTY = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
PANICS: dict[str, dict[str, Any]] = {
    "a map that cannot be parsed": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "an empty pattern": {"normalizer": EMPTY},
    "an empty expression": {"normalizer": {**EMPTY, "pattern": {"Regex": ""}}},
    "an expression that backtracks": {"pre_tokenizer": BACKTRACKS},
    "a replacement that backtracks": {"normalizer": {**EMPTY, "pattern": BACKTRACKS["pattern"]}},
}
#: On it the library panics with every one of them.
TEXT = "a" * 40 + "b alpha"


def tokenizer(**changes: Any) -> TokenizerFiles:
    files = bytes_tokenizer(turns=True)
    return {**files, FAST: json.dumps(json.loads(files[FAST]) | changes)}


def write(directory: Path, files: TokenizerFiles) -> str:
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return str(directory)


def corpus_at(directory: Path) -> Path:
    stories = write_stories(directory)
    for part in range(3):
        (stories / f"part-{part}" / "a.md").write_text(TEXT, encoding="utf-8")
    return stories


@pytest.mark.parametrize("name", PANICS)
def test_the_library_panics(name: str) -> None:
    with pytest.raises(BaseException) as error:
        Library.from_str(tokenizer(**PANICS[name])[FAST]).encode_batch_fast([TEXT])
    assert type(error.value).__name__ == "PanicException" and not isinstance(error.value, Exception)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=[] if name == "an empty pattern" else pytest.mark.prove)
        for workers in (1, 2)
        for name in PANICS
    ],
)
def test_a_panic_is_one_line(
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "PIECE_FILES", 25)  # only this process cuts pieces
    where = write(tmp_path / "tokenizer", tokenizer(**PANICS[name]))
    with refuses(UserError) as error:
        prepare_language(tmp_path / "data", corpus_at(tmp_path / "stories"), workers, tokenizer=where)
    assert error.value.message.startswith(LINE) and "\n" not in error.value.message
    output = capfd.readouterr()
    assert "panicked" not in output.err + output.out and "backtrace" not in output.err + output.out
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("workers", first_few([1, 2]))
def test_an_overlap_of_the_whole_length_is_no_panic(workers: int, tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 4}
    files, stories = tokenizer(truncation=truncation), corpus_at(tmp_path / "stories")
    with pytest.raises(BaseException, match="must be strictly less"):
        Library.from_str(files[FAST]).encode_batch_fast([TEXT])
    plain = prepare_language(tmp_path / "plain", stories)
    data = prepare_language(tmp_path / "data", stories, workers, tokenizer=write(tmp_path / "own", files))
    assert data.card["tokens"] == plain.card["tokens"]


@pytest.mark.prove
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.prove), 2])
def test_a_panic_in_conversations_is_one_line(workers: int, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    where = write(tmp_path / "own", {**tokenizer(pre_tokenizer=BACKTRACKS), TEMPLATE: template})
    rows = [{"prompt": TEXT if n == 3 else "b", "completion": story(n)} for n in range(60)]
    with pytest.raises(UserError, match=f"^{re.escape(LINE)}.*retry-limit-in-match over"):
        prepare_language(
            tmp_path / "data", write_lines(tmp_path / "t.jsonl", rows), workers, tokenizer=where, length=999
        )


def test_a_panic_in_decoding_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    content = json.loads(tokenizer(decoder={**EMPTY, "pattern": BACKTRACKS["pattern"]})[FAST])
    content["model"]["vocab"]["a" * 40 + "b"] = 300
    files, ids = {**tokenizer(), FAST: json.dumps(content)}, [300]
    with pytest.raises(BaseException, match="retry-limit-in-match over"):
        Library.from_str(files[FAST]).decode(ids)
    capfd.readouterr()
    with pytest.raises(UserError, match=f"^{re.escape(LINE)}"):
        Tokenizer(files).decode(ids)
    assert capfd.readouterr().err == ""


#: Every run of 19 is below the limit of the expression's library and takes it 20 ms.
SLOW = ("a" * 19 + "b") * 2000


@pytest.mark.prove
def test_an_expression_that_takes_long_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SECONDS", 1)
    found = Tokenizer(tokenizer(pre_tokenizer=BACKTRACKS))
    with pytest.raises(UserError, match=rf"^{re.escape(LINE)}.* [12] s of CPU"):
        found.documents([SLOW])
    (ids,) = found.documents(["a" * 19 + "b"])
    assert len(ids) == 22, "the next call has a process of its own"


@pytest.mark.prove
@pytest.mark.parametrize("workers", [1, 2])
def test_within_the_limits_that_users_have(workers: int, tmp_path: Path) -> None:
    stories = write_stories(tmp_path / "stories")
    (stories / "part-0" / "slow.md").write_text(SLOW * 10, encoding="utf-8")
    where = write(tmp_path / "own", tokenizer(pre_tokenizer=BACKTRACKS))
    with pytest.raises(UserError, match=r" 7\d s of CPU"):
        prepare_language(tmp_path / "data", stories, workers, tokenizer=where)


def test_a_text_that_grows_without_end_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MEMORY", 512 << 20)
    doubled = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    files = tokenizer(normalizer={"type": "Sequence", "normalizers": [doubled] * 9})
    with pytest.raises(UserError, match=f"^{re.escape(LINE)}.* SIGABRT"):
        Tokenizer(files).documents(["alpha"])


def test_settings_that_nest_without_end_are_one_line() -> None:
    with pytest.raises(UserError, match=r"^data\.tokenizer: tokenizer_config\.json"):
        Tokenizer({**bytes_tokenizer(turns=False), SETTINGS: "[" * 100_000})


def test_texts_that_fail_in_training_keep_their_error() -> None:
    def interrupted() -> Any:
        yield "alpha"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.trained_bpe(interrupted(), 300, ["<|endoftext|>"])


def test_one_module_imports_the_library() -> None:
    files = [path for folder in ("slipstream", "tasks", "workflows") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if "tokenizers" in cached_syntax(path).imports] == ["engine.py"]
