"""Texts: class folders of text files, or a column of a table, as hashed words that a model embeds and ONNX runs."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from slipstream.pipeline.evaluate.engine import feature_table
from slipstream.pipeline.export.convert import EXAMPLE_ROWS, to_onnx
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.source.columns.transform import BUCKETS, Transform, tokenise_texts
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from tests.support.tables import Prepare, everything
from tests.support.wording import refuses

WORDS = {"good": ["lovely", "great", "fine", "happy"], "bad": ["awful", "poor", "sad", "broken"]}
COMMON = [f"word{n}" for n in range(50)]


def review(label: str, draw: np.random.Generator) -> str:
    return " ".join([*draw.choice(COMMON, 8), *draw.choice(WORDS[label], 4), *draw.choice(COMMON, 8)])


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for label in WORDS:
        (tmp_path / "reviews" / label).mkdir(parents=True)
        for number in range(300):
            (tmp_path / "reviews" / label / f"{number}.txt").write_text(review(label, draw) + f" no{number}\n")
    return tmp_path / "reviews"


class TestTokens:
    def test_words_and_pairs_follow_each_other_and_padding_is_zero(self) -> None:
        one, two, reverse, same, empty, missing = tokenise_texts(
            pa.array(["to be", "to", "be to", " TO,  be!\n", "", None]), 8
        )
        assert (one[:2] != 0).all() and one[2] != 0 and (one[3:] == 0).all()
        assert one[0] == two[0] and (two[1:] == 0).all()
        assert (reverse[0], reverse[2]) == (one[2], one[0]) and reverse[1] != one[1]
        np.testing.assert_array_equal(one, same)
        assert not empty.any() and not missing.any()

    def test_a_text_has_the_same_ids_whatever_it_is_among(self) -> None:
        draw = np.random.default_rng(0)
        texts = [review("good", draw) for _ in range(50)]
        alone = np.concatenate([tokenise_texts(pa.array([text]), 32) for text in texts])
        np.testing.assert_array_equal(tokenise_texts(pa.array(texts), 32), alone)
        np.testing.assert_array_equal(tokenise_texts(pa.array(texts).dictionary_encode(), 32), alone)
        assert alone.min() >= 0 and alone.max() < BUCKETS

    def test_forms_of_unicode_and_long_texts(self) -> None:
        composed, decomposed = tokenise_texts(pa.array(["Åse", "A\u030ase"]), 8)
        np.testing.assert_array_equal(composed, decomposed)
        assert (tokenise_texts(pa.array(["word " * 300_000]), 16) != 0).all()
        assert tokenise_texts(pa.array([], pa.string()), 16).shape == (0, 16)


class TestFolders:
    def test_class_folders_of_text_files_are_a_table_of_texts(self, prepared: Prepare, folders: Path) -> None:
        data = prepared(folders, target="", text_length=64)
        signature = data.signature
        assert (signature.classes, signature.target, signature.buckets) == (("bad", "good"), "class", BUCKETS)
        assert [(spec.name, spec.dtype, spec.shape) for spec in signature.inputs] == [("tokens", "int32", (1, 64))]
        texts = {label: [p.read_text() for p in (folders / label).iterdir()] for label in WORDS}
        rows = {row["tokens"].tobytes(): signature.classes[row["target"]] for row in everything(data)}
        for label, result in texts.items():
            for row in tokenise_texts(pa.array(result), 64):
                assert rows[row[None].tobytes()] == label

    def test_the_same_bytes_on_any_number_of_processes(
        self, prepared: Prepare, folders: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("slipstream.shared.source.documents.BLOCK_FILES", 90)
        one, two = prepared(folders, target=""), prepared(folders, target="", workers=2)
        for name in ("train-00000.rows", "test-00000.rows", "card.json"):
            assert one.artifact.files[name].sha256 == two.artifact.files[name].sha256

    def test_what_is_no_text_is_set_aside(self, prepared: Prepare, folders: Path) -> None:
        (folders / "good" / "latin.txt").write_bytes("Ærlig".encode("latin-1"))
        (folders / "good" / "void.txt").write_bytes(b" \n")
        data = prepared(folders, target="")
        rows = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
        assert {(Path(row["file"]).name, row["reason"]) for row in rows} == {
            ("latin.txt", "not utf-8 (data.encoding)"),
            ("void.txt", "the file is empty"),
        }
        assert data.card["rows"]["read"] == 602 and data.card["rows"]["kept"] == 600

    def test_with_a_target_text_files_are_tables_as_before(self, prepared: Prepare, folders: Path) -> None:
        with refuses(UserError):
            prepared(folders, target="y", format="text")
        with refuses(UserError, match=r"0\.txt:"):
            prepared(folders / "good", target="", format="text")
        with refuses(UserError):
            prepared(folders, target="y")


def mixed_table() -> pa.Table:
    draw = np.random.default_rng(1)
    labels = draw.choice(["good", "bad"], 400)
    return pa.table(
        {
            "review": [review(label, draw) * 3 for label in labels],
            "stars": draw.normal(size=400),
            "shop": draw.choice(["north", "south"], 400),
            "y": labels,
        }
    )


def test_a_column_of_texts_is_an_input_beside_others(prepared: Prepare) -> None:
    plain = prepared(mixed_table())
    assert any("'review' is not used" in word and "as document" in word for word in plain.card["warnings"])
    data = prepared(mixed_table(), types={"review": "document"}, text_length=32)
    assert [spec.name for spec in data.signature.inputs] == ["numeric", "categorical", "tokens"]
    assert next(c["role"] for c in data.card["columns"] if c["name"] == "review") == "document"
    transform = Transform.from_json(json.loads(json.dumps(data.artifact.read_json("statistics.json"))))
    rows = np.zeros(400, data.signature.record)
    batch = mixed_table().drop_columns("y").combine_chunks().to_batches()[0]
    transform.encode(batch, rows)
    scored = sorted(row.tobytes()[: data.signature.record.fields["target"][1]] for row in rows)  # type: ignore[index]
    stored = everything(data)
    assert scored == sorted(row.tobytes()[: stored.dtype.fields["target"][1]] for row in stored)  # type: ignore[index]


def trained(data: PreparedData, steps: int = 60) -> torch.nn.Module:
    rows = data.split("train")
    inputs = [torch.from_numpy(np.array(rows[spec.name])) for spec in data.signature.inputs]
    truth = torch.from_numpy(np.array(rows["target"])).long()
    model = build_model(ModelConfig(), data.signature, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(*inputs), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_the_default_model_learns_texts_and_runs_in_onnx_runtime(prepared: Prepare, folders: Path) -> None:
    import onnxruntime

    data = prepared(folders, target="", text_length=48)
    model, test = trained(data, 40), data.split("test")
    tokens = np.array(test["tokens"])
    with torch.no_grad():
        result = model(torch.from_numpy(tokens))
    assert np.mean(result.argmax(dim=1).numpy() == test["target"]) > 0.9
    assert feature_table(data.signature, test).shape == (len(test), 256)
    path = folders / "model.onnx"
    to_onnx(model, data.signature, [np.resize(tokens, (EXAMPLE_ROWS, *tokens.shape[1:]))], 20, path)
    session = onnxruntime.InferenceSession(path)
    np.testing.assert_allclose(session.run(None, {"tokens": tokens})[0], result.numpy(), rtol=1e-4, atol=1e-5)


def test_new_texts_are_added_to_an_earlier_set(folders: Path, tmp_path: Path) -> None:
    """Three times, with the fingerprint that the job's first task takes: of no target, as texts have none to name."""
    directories = [tmp_path / str(number) for number in range(3)]
    for number, directory in enumerate(directories):
        if number:
            (folders / "good" / f"new{number}.txt").write_text(f"a new text, {number} of them, and it is good")
        listing = list_source(str(folders))
        config = DataConfig(earlier=str(directories[number - 1])) if number else DataConfig()
        prepare(directory, listing, "", config, {"source": fingerprint_source(listing)})
    read = [Artifact.open(directory, "prepare").read_json("card.json")["rows"]["read"] for directory in directories]
    assert read == [read[0], read[0] + 1, read[0] + 2]
