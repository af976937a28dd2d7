"""Untrusted tokenizer files: no other file is read or copied through them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner

from slipstream.pipeline.export.hugging_face import main
from slipstream.shared.artifacts.prepared.token_rows import FILES, LONGEST_FILE
from slipstream.shared.errors import UserError
from slipstream.shared.language.tokenizer import read_tokenizer, vocabulary_beside
from tests.support.bases import make_base
from tests.support.corpora import prepare_language, write_stories
from tests.support.tokens import VOCABULARY, data_with_words, small_transformer, token_data, word_tokenizer
from tests.support.untrusted import download_from_hub, exchange_at_open, holds_secret, make_secret, replace_by_link
from tests.support.wording import refuses, same_wording


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        work()
    assert "\n" not in refused.value.message and refused.value.message.startswith("data.tokenizer: ")
    return refused.value.message


@pytest.mark.parametrize("name", FILES)
def test_no_companion_is_read_through_a_link_that_leads_out(name: str, base: Path, tmp_path: Path) -> None:
    secret = make_secret(tmp_path)
    replace_by_link(base / name, os.path.relpath(secret, base))
    said = refusal(lambda: read_tokenizer(str(base)))
    assert f"{base / name}: leads to {secret}, outside of {base}" in said


def test_nothing_of_another_file_is_prepared(base: Path, tmp_path: Path) -> None:
    replace_by_link(base / "merges.txt", make_secret(tmp_path))
    stories = write_stories(tmp_path / "stories")
    said = refusal(lambda: prepare_language(tmp_path / "prepared", stories, tokenizer=str(base)))
    assert "merges.txt: leads to" in said and not holds_secret(tmp_path / "prepared")


def test_a_companion_that_is_exchanged_while_it_is_opened(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "merges.txt").write_text("#version: 0.2")
    read_tokenizer(str(base))
    exchanged = exchange_at_open(monkeypatch, base / "merges.txt", make_secret(tmp_path))
    assert "outside of" in refusal(lambda: read_tokenizer(str(base))) and exchanged


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer.json", "chat_template.jinja"])
def test_a_companion_that_is_no_regular_file_or_has_no_end(name: str, base: Path) -> None:
    replace_by_link(base / name, "/dev/zero")
    same_wording(refusal(lambda: read_tokenizer(str(base))))
    (base / name).unlink()
    os.mkfifo(base / name)
    same_wording(refusal(lambda: read_tokenizer(str(base))))
    (base / name).unlink()
    with (base / name).open("xb") as file:
        file.truncate(LONGEST_FILE + 1)
    same_wording(refusal(lambda: read_tokenizer(str(base))))


def test_the_configuration_beside_a_tokenizer(base: Path, tmp_path: Path) -> None:
    replace_by_link(base / "config.json", make_secret(tmp_path))
    assert "config.json: leads to" in refusal(lambda: vocabulary_beside(str(base)))
    replace_by_link(base / "config.json", "/dev/zero")
    same_wording(refusal(lambda: vocabulary_beside(str(base))))


def test_the_tokenizer_of_hugging_faces_cache(base: Path, tmp_path: Path) -> None:
    snapshot = download_from_hub(base, tmp_path / "cache")
    assert read_tokenizer(str(snapshot)) == read_tokenizer(str(base))
    assert vocabulary_beside(str(snapshot)) == vocabulary_beside(str(base)) > 0
    (tmp_path / "mine").symlink_to(snapshot)
    assert read_tokenizer(str(tmp_path / "mine")) == read_tokenizer(str(base))
    replace_by_link(snapshot / "merges.txt", make_secret(tmp_path))
    assert "merges.txt: leads to" in refusal(lambda: read_tokenizer(str(snapshot)))


def test_rows_of_tokens_keep_nothing_of_another_file(tmp_path: Path) -> None:
    word_tokenizer(VOCABULARY).save_pretrained(tmp_path / "words")
    replace_by_link(tmp_path / "words/merges.txt", make_secret(tmp_path))
    with refuses(UserError, match=r"merges\.txt:"):
        token_data(tmp_path / "data", tmp_path / "words")
    assert not holds_secret(tmp_path / "data")


def test_the_command_that_writes_a_model_copies_no_other_file(tmp_path: Path) -> None:
    trained = small_transformer(tmp_path / "trained", data_with_words(tmp_path)).directory
    words, secret = tmp_path / "words", make_secret(tmp_path)
    arguments = [str(trained), str(tmp_path / "written"), "--tokenizer", str(words)]
    for name in ("merges.txt", "tokenizer_config.json", "tokenizer.model"):
        kept = shutil.copytree(words, tmp_path / "kept", dirs_exist_ok=True)
        replace_by_link(words / name, secret)
        said = CliRunner().invoke(main, arguments)
        assert said.exit_code == 1
        same_wording(said.output)
        assert not (tmp_path / "written").exists()
        shutil.rmtree(words)
        shutil.move(kept, words)
    snapshot = download_from_hub(words, tmp_path / "cache")
    said = CliRunner().invoke(main, [*arguments[:-1], str(snapshot)])
    assert said.exit_code == 0, said.output
    assert not any(path.is_symlink() for path in (tmp_path / "written").iterdir())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "written")("w3")["input_ids"] == [3]
