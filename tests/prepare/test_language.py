"""Documents to rows of tokens: files and tables, splits, packing, tokenizers; the same on any number of workers."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.language import corpus, encode
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.documents import read_documents
from slipstream.shared.errors import UserError
from slipstream.shared.language.tokenizer import Tokenizer, train_tokenizer
from slipstream.shared.source import quarantine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.documents import list_standard_library
from slipstream.shared.storage import s3
from tests.support.corpora import prepare_language, rows_of, story, write_lines, write_stories
from tests.support.faulty_s3 import FaultyS3
from tests.support.wording import same_wording

END = 256


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    return write_stories(tmp_path / "stories")


def texts_in(rows: np.ndarray) -> list[str]:
    """The whole documents in rows of bytes in the order in which they were packed."""
    tokens = np.concatenate([rows[0, :1], rows[:, 1:].ravel()]).tolist()
    ends = [place for place, token in enumerate(tokens) if token == END]
    return [bytes(tokens[a + 1 : b]).decode() for a, b in pairwise(ends)]


def test_documents_are_packed_with_an_end_and_every_token_is_a_target_once(stories: Path, tmp_path: Path) -> None:
    data = prepare_language(tmp_path / "data", stories, shuffle=False)
    assert data.signature.record.itemsize == 2 * 33 and data.signature.document_end == END
    found = {split: texts_in(rows_of(data, split)) for split in ("train", "validation", "test")}
    expected = {story(number) for number in range(60)}
    assert all(set(texts) <= expected for texts in found.values())
    # Of each split only the last row's rest is left out, less than a row.
    card = data.card["rows"]
    for split, texts in found.items():
        assert card[split] - 1 <= len(texts) <= card[split] and len(set(texts)) == len(texts)
        rows = rows_of(data, split)
        assert (rows[1:, 0] == rows[:-1, -1]).all() and rows[0, 0] == END
        tokens = data.card["tokens"][split]
        assert len(rows) == tokens // 32
    assert sum(card[split] for split in found) == card["read"] == 60


def test_rows_are_shuffled_and_documents_are_kept_whole_beside_them(stories: Path, tmp_path: Path) -> None:
    plain = prepare_language(tmp_path / "plain", stories, shuffle=False)
    data = prepare_language(tmp_path / "data", stories)
    before, after = rows_of(plain, "train"), rows_of(data, "train")
    assert not (before == after).all() and sorted(before.tolist()) == sorted(after.tolist())
    test = read_documents(data.artifact, "test")
    assert len(test) == data.card["rows"]["test"]
    for document in test:
        assert document.tokens[0] == document.tokens[-1] == END
        assert bytes(document.tokens[1:-1].tolist()).decode() == document.texts[0]
        assert document.bytes == len(document.tokens) - 2
    train = read_documents(data.artifact, "train")
    assert len(train) == data.card["rows"]["train"] and not any(len(document.tokens) for document in train)


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet", "arrow"])
def test_a_column_text_is_the_same_documents(form: str, stories: Path, tmp_path: Path) -> None:
    files = sorted(stories.rglob("*.md"))
    rows = [{"text": path.read_text(encoding="utf-8"), "other": 1} for path in files]
    path = tmp_path / f"stories.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=17)
    elif form == "arrow":
        with pa.ipc.new_file(path, pa.Table.from_pylist(rows).schema) as file:
            file.write_table(pa.Table.from_pylist(rows), max_chunksize=13)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if form.endswith("gz") else content)
    one, other = prepare_language(tmp_path / "a", stories), prepare_language(tmp_path / "b", path)
    for split in ("train", "validation", "test"):
        assert (rows_of(one, split) == rows_of(other, split)).all()


def test_lines_are_read_once_wherever_pieces_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": story(number)} for number in range(60)]
    path = write_lines(tmp_path / "stories.jsonl", [*rows[:40], "no json", *rows[40:]])
    whole = prepare_language(tmp_path / "whole", path, quarantine_limit=0.1)
    for step in (len(path.read_bytes().partition(b"\n")[0]) + 1, 997):
        monkeypatch.setattr(corpus, "PIECE_BYTES", step)
        pieces = prepare_language(tmp_path / f"pieces-{step}", path, quarantine_limit=0.1)
        for split in ("train", "validation", "test"):
            assert (rows_of(whole, split) == rows_of(pieces, split)).all()
        (bad,) = quarantine.read_quarantine(pieces.artifact)
        assert (bad.line, bad.reason) == (41, "not JSON")


def test_any_number_of_workers_makes_the_same_bytes(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_FILES", 7)  # only this process cuts pieces
    digests = []
    for workers in (1, 2):
        data = prepare_language(tmp_path / f"{workers}", stories, workers, tokenizer="train", vocabulary=300)
        digests.append({name: file.sha256 for name, file in data.artifact.files.items()})
    assert digests[0] == digests[1] and len(digests[0]) > 6


def test_copies_share_a_split_and_are_told(tmp_path: Path) -> None:
    rows = [{"text": story(number % 40)} for number in range(120)]
    data = prepare_language(tmp_path / "data", write_lines(tmp_path / "copies.jsonl", rows))
    of_split = {split: {d.texts[0] for d in read_documents(data.artifact, split)} for split in ("train", "test")}
    assert of_split["train"] and of_split["test"] and not of_split["train"] & of_split["test"]
    assert data.card["warnings"] == ["80 documents are copies of others; copies share a split"]


def test_a_tokenizer_is_trained_on_the_training_split_alone_and_travels(stories: Path, tmp_path: Path) -> None:
    data = prepare_language(tmp_path / "data", stories, tokenizer="train", vocabulary=320)
    assert data.signature.buckets == 320
    texts = [document.texts[0] for document in read_documents(data.artifact, "train")]
    files = train_tokenizer(texts, 320, turns=False)
    stored = {name: data.artifact.read_bytes(f"tokenizer/{name}").decode() for name in files}
    assert stored == files
    everything = train_tokenizer([story(number) for number in range(60)], 320, turns=False)
    assert everything != files, "held-out text would have been seen"
    # The stored one can be given for other data.
    again = prepare_language(tmp_path / "again", stories, tokenizer=str(tmp_path / "data/tokenizer"))
    assert (rows_of(again, "train") == rows_of(data, "train")).all()
    tokenizer = Tokenizer(files)
    text = "<|endoftext|> is only text, as in épsilon\n"
    (ids,) = tokenizer.documents([text])
    assert tokenizer.end not in ids and tokenizer.decode(ids.tolist()) == text


def test_the_type_is_the_narrowest(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = prepare_language(tmp_path / "narrow", stories)
    monkeypatch.setattr("slipstream.pipeline.prepare.language.engine.MOST_NARROW", 256)
    wide = prepare_language(tmp_path / "wide", stories, across_documents=True)
    assert narrow.signature.inputs[0].dtype == "int16" and wide.signature.inputs[0].dtype == "int32"
    assert (rows_of(narrow, "train") == rows_of(wide, "train")).all() and wide.signature.document_end == -1


def test_in_a_store_it_is_the_same(tmp_path: Path, store: FaultyS3) -> None:
    path = write_lines(tmp_path / "stories.jsonl", [{"text": story(number)} for number in range(60)])
    here = prepare_language(tmp_path / "here", path, tokenizer="train", vocabulary=300)
    for each in (path, *(tmp_path / "here/tokenizer").iterdir()):
        key = each.relative_to(tmp_path).as_posix()
        s3.client().put_object(Bucket="bucket", Key=key, Body=each.read_bytes())
    there = prepare_language(tmp_path / "there", "s3://bucket/stories.jsonl", tokenizer="s3://bucket/here/tokenizer")
    assert there.card["rows"] == here.card["rows"]
    for split in ("train", "validation", "test"):
        assert (rows_of(here, split) == rows_of(there, split)).all()


def test_what_was_interrupted_resumes_with_the_same_bytes(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_FILES", 7)
    config = DataConfig.from_dict({"task": "language", "vocabulary": 300, "length": 32})
    prepare(tmp_path / "whole", str(stories), "", config, {})
    encoded, real = [], encode.encode_documents

    def killed(job: encode.EncodeDocumentsJob) -> encode.EncodedChunk:
        encoded.append(job.spool.name)
        if len(encoded) == 4:
            raise KeyboardInterrupt
        return real(job)

    killed.__name__ = real.__name__
    monkeypatch.setattr("slipstream.pipeline.prepare.language.engine.encode_documents", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "first", str(stories), "", config, {}, scratch=tmp_path / "scratch")
    resumed = prepare(tmp_path / "second", str(stories), "", config, {}, scratch=tmp_path / "scratch")
    assert len(encoded) == 10 and len(set(encoded)) == 9, "three of nine pieces were done"
    assert resumed.files == Artifact.open(tmp_path / "whole", "prepare").files


def test_without_an_address_it_is_the_standard_library_without_its_tests() -> None:
    names = [file.uri for file in list_standard_library().files]
    assert len(names) > 400 and not any("/test/" in name or "/site-packages/" in name for name in names)
    assert any(name.endswith("/argparse.py") for name in names)


def refused(tmp_path: Path, data: Path | str, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        prepare_language(tmp_path / "refused", data, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestBadInput:
    def test_no_file(self, tmp_path: Path) -> None:
        same_wording(refused(tmp_path, tmp_path / "nowhere"))
        (tmp_path / "empty").mkdir()
        same_wording(refused(tmp_path, tmp_path / "empty"))

    def test_not_utf_8(self, stories: Path, tmp_path: Path) -> None:
        (stories / "latin.md").write_bytes("Größe".encode("latin-1"))
        found = refused(tmp_path, stories, quarantine_limit=0.0)
        assert "latin.md" in found and "not utf-8 (data.encoding)" in found
        lines = tmp_path / "latin.jsonl"
        lines.write_bytes(b'{"text": "a"}\n{"text": "Gr\xf6\xdfe"}\n')
        assert "not UTF-8" in refused(tmp_path, lines)

    def test_all_shorter_than_a_row(self, stories: Path, tmp_path: Path) -> None:
        found = refused(tmp_path, stories, length=100_000)
        assert found.startswith("data.length:") and "100,000" in found
        same_wording(found)

    def test_no_tokenizer(self, stories: Path, tmp_path: Path) -> None:
        same_wording(refused(tmp_path, stories, tokenizer="tranie"))
        same_wording(refused(tmp_path, stories, tokenizer=str(stories)))
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken/tokenizer.json").write_text("{}")
        (tmp_path / "broken/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        broken = refused(tmp_path, stories, tokenizer=str(tmp_path / "broken"))
        assert broken.startswith("data.tokenizer:")
        same_wording(broken)
        (tmp_path / "broken/tokenizer.json").write_text("[" * 100_000)
        same_wording(refused(tmp_path, stories, tokenizer=str(tmp_path / "broken")))

    def test_other_columns_and_settings(self, stories: Path, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "t.jsonl", [{"body": "x"}])
        same_wording(refused(tmp_path, path))
        same_wording(refused(tmp_path, stories, group="g"))
        (stories / "table.jsonl").write_text('{"text": "x"}\n')
        same_wording(refused(tmp_path, stories))
        assert refused(tmp_path, stories, format="csv").startswith("data.format: csv")
        numbers = write_lines(tmp_path / "n.jsonl", [{"text": 3}, {"text": ""}])
        same_wording(refused(tmp_path, numbers))
