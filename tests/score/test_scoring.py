"""Published scores equal the model's outputs for every row, in any storage format and by any number of pods."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from slipstream.pipeline.export import engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.export.package.sign import sign_package
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.model import PREPARED, RAW
from slipstream.pipeline.score.plan import table_key
from slipstream.pipeline.score.publish import fetch_table, list_publications, read_manifest, score_data
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source import quarantine
from slipstream.shared.source.columns.transform import tokenise_texts
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.resolved import load_digits
from slipstream.shared.storage import s3
from tests.support.faulty_s3 import FaultyS3
from tests.support.packages import package
from tests.support.raw_tables import as_raw
from tests.support.scoring import KEEP, bytes_below, in_shares, manifest_of, rows, scored, table_of, write_files
from tests.support.toys import ToyTrained
from tests.support.wording import refuses

NUMBER = 5000


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return rows(NUMBER)


def by_the_model(registry: Registry, frame: pd.DataFrame) -> tuple[list[str], np.ndarray]:
    """Labels and probabilities of all rows by one call of the raw model."""
    directory = Path(registry.uri).parent / "package"
    columns = read_columns(json.loads((directory / "statistics.json").read_text()))
    assert isinstance(columns, RawColumns)
    session = onnxruntime.InferenceSession(directory / "model.raw.onnx", providers=["CPUExecutionProvider"])
    batch = pa.RecordBatch.from_pandas(frame[list(columns.types)], preserve_index=False)
    feed = {name: values[:, None] if values.ndim == 1 else values for name, values in as_raw(batch, columns).items()}
    labels, probabilities = session.run(["label", "probabilities"], feed)
    return labels[:, 0].tolist(), probabilities


def write(frame: pd.DataFrame, directory: Path, suffix: str) -> Path:
    directory.mkdir()
    path = directory / f"rows{suffix}"
    if suffix == ".parquet":
        frame.to_parquet(path, index=False, row_group_size=1500)
    elif suffix == ".arrow":
        feather.write_feather(pa.Table.from_pandas(frame, preserve_index=False), str(path), chunksize=700)
    elif suffix.startswith(".jsonl"):
        frame.to_json(path, orient="records", lines=True, date_format="iso", date_unit="us", double_precision=15)
    else:
        frame.to_csv(path, index=False)
    return path


def test_every_row_has_what_the_model_says_of_it(served: Registry, frame: pd.DataFrame, tmp_path: Path) -> None:
    table = scored(served, write(frame, tmp_path / "in", ".parquet"), tmp_path / "out")
    labels, probabilities = by_the_model(served, frame)
    assert table.column_names == ["id", "label", "probability_no", "probability_yes", "model_version"]
    assert table["id"].to_pylist() == frame["id"].tolist()
    assert table["label"].to_pylist() == labels and set(labels) == {"no", "yes"}
    ours = np.stack([table["probability_no"].to_numpy(), table["probability_yes"].to_numpy()], axis=1)
    assert np.abs(ours - probabilities).max() < 1e-5
    promoted = served.promoted()
    assert promoted and set(table["model_version"].to_pylist()) == {promoted.version}


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".jsonl", ".arrow"])
def test_the_format_makes_no_difference(served: Registry, frame: pd.DataFrame, tmp_path: Path, suffix: str) -> None:
    expected = scored(served, write(frame, tmp_path / "parquet", ".parquet"), tmp_path / "one")
    table = scored(served, write(frame, tmp_path / "other", suffix), tmp_path / "two")
    assert table["id"].equals(expected["id"]) and table["label"].equals(expected["label"])
    close = np.abs(table["probability_yes"].to_numpy() - expected["probability_yes"].to_numpy()).max()
    assert close < (1e-5 if suffix == ".jsonl" else 1e-6)  # pandas writes 15 digits into JSON


@pytest.mark.prove
def test_a_regression_has_values(regression: Registry, frame: pd.DataFrame, tmp_path: Path) -> None:
    table = scored(regression, write(frame, tmp_path / "in", ".csv"), tmp_path / "out")
    assert table.column_names == ["id", "value", "model_version"]
    age = frame["age"].to_numpy()
    known = ~np.isnan(age)
    assert np.corrcoef(table["value"].to_numpy()[known], age[known])[0, 1] > 0.5


def test_the_preparation_stands_in_where_the_raw_model_cannot(
    without_marks: Registry, served_before: Registry, frame: pd.DataFrame, tmp_path: Path
) -> None:
    data = write(frame, tmp_path / "in", ".parquet")
    publication, _ = score_data(without_marks.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP)
    other, _ = score_data(served_before.uri, str(data), str(tmp_path / "other"), DataConfig(), KEEP)
    assert manifest_of(tmp_path / "out", publication).by == PREPARED
    assert manifest_of(tmp_path / "other", other).by == RAW
    table, raw = table_of(tmp_path / "out", publication), table_of(tmp_path / "other", other)
    same = np.mean(np.array(table["label"].to_pylist()) == np.array(raw["label"].to_pylist()))
    assert same > 0.98  # two trainings on the same rows


@pytest.mark.prove
def test_images_are_scored_file_by_file(of_images: Registry, tmp_path: Path) -> None:
    from PIL import Image

    folder = tmp_path / "in"
    folder.mkdir()
    for place, name in enumerate(("left", "middle", "right")):
        pixels = np.full((9, 9), 3, np.uint8)
        pixels[:, 3 * place : 3 * place + 3] = 11
        Image.fromarray(pixels).save(folder / f"{name}.png")
    (folder / "torn.png").write_bytes((folder / "left.png").read_bytes()[:40])
    table = scored(of_images, folder, tmp_path / "out", ScoringConfig(), quarantine_limit=0.5)
    found = dict(zip(table["file"].to_pylist(), table["label"].to_pylist(), strict=True))
    assert found == {"left.png": "left", "middle.png": "middle", "right.png": "right"}
    assert table.column_names[:3] == ["file", "row", "label"]


@pytest.mark.prove
def test_one_two_and_four_pods_write_the_same_bytes(
    served: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.pipeline.score.plan.PART_BYTES", 40_000)
    data = write_files(tmp_path / "in", files=7, of_each=400)
    outputs = {number: tmp_path / f"out-{number}" for number in (1, 2, 4)}
    found = {number: in_shares(served, data, output, number) for number, output in outputs.items()}
    assert len({publication.manifest for publication in found.values()}) == 1
    files = {number: bytes_below(output) for number, output in outputs.items()}
    assert files[1] == files[2] == files[4] and sum("part-" in name for name in files[1]) == 7
    again = score_data(served.uri, str(data), str(tmp_path / "processes"), DataConfig(), KEEP, workers=3)[0]
    assert again.manifest == found[1].manifest


def test_a_table_is_published_once(served: Registry, tmp_path: Path) -> None:
    data, output = write_files(tmp_path / "in", files=2, of_each=300), tmp_path / "out"
    first, new = score_data(served.uri, str(data), str(output), DataConfig(), KEEP)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    again, second = score_data(served.uri, str(data), str(output), DataConfig(), KEEP)
    assert (new, second, again) == (True, False, first)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == before
    other, new = score_data(served.uri, str(data), str(output), DataConfig(), replace(KEEP, keep=[]))
    assert new and other.key != first.key and (first.number, other.number) == (1, 2)
    rows(50, seed=3).to_csv(data / "02.csv", index=False)
    third, new = score_data(served.uri, str(data), str(output), DataConfig(), KEEP)
    assert new and [each.key for each in list_publications(str(output))] == [first.key, other.key, third.key]


def test_of_two_at_once_the_second_finds_the_first_ones_table(served: Registry, tmp_path: Path) -> None:
    data, output = write_files(tmp_path / "in", files=3, of_each=200), tmp_path / "out"
    one = in_shares(served, data, output, 1)
    stray = output / f"tables/{one.key}/part-000000-0123456789abcdef.parquet"
    stray.write_bytes(b"of a run on other processors")
    two = in_shares(served, data, output, 2)
    assert one == two and not stray.exists()
    assert len(list((output / "published").iterdir())) == 1
    table_of(output, one)


def test_rows_that_cannot_be_scored_are_set_aside(served: Registry, tmp_path: Path) -> None:
    data = write_files(tmp_path / "in", files=2, of_each=500)
    lines = (data / "01.csv").read_text().splitlines()
    lines[100] = lines[100].replace(lines[100].split(",")[2], "many", 1)
    lines[200] += ",too,wide"
    lines[300] = "inf," + lines[300].split(",", 1)[1]
    (data / "01.csv").write_text("\n".join(lines) + "\n")
    publication, _ = score_data(served.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP)
    table = manifest_of(tmp_path / "out", publication)
    assert (table.rows, table.scored, table.set_aside) == (1000, 997, 3)
    (aside,) = (tmp_path / "out/tables" / publication.key).glob("_quarantine/*.parquet")
    found = pq.read_table(aside).to_pylist()
    assert [(row["file"], row["line"], row["column"], row["reason"]) for row in found] == [
        ("01.csv", 101, "visits", "not integer"),
        ("01.csv", 201, "", "10 fields, expected 8"),
        ("01.csv", 301, "age", "infinite"),
    ]
    assert found[0]["raw"] == "many" and {reason.rows for reason in table.reasons} == {1}
    assert table_of(tmp_path / "out", publication).num_rows == 997


def test_columns_that_directories_give_are_read(served: Registry, frame: pd.DataFrame, tmp_path: Path) -> None:
    for plan, part in frame.groupby("plan"):
        folder = tmp_path / f"in/plan={plan}"
        folder.mkdir(parents=True)
        part.drop(columns="plan").to_parquet(folder / "rows.parquet", index=False)
    found = scored(served, tmp_path / "in", tmp_path / "out").to_pandas().set_index("id")
    whole = scored(served, write(frame, tmp_path / "whole", ".parquet"), tmp_path / "one").to_pandas().set_index("id")
    assert (found["label"] == whole.loc[found.index, "label"]).all()


def test_parts_hold_many_small_files_and_no_file_twice(served: Registry, tmp_path: Path) -> None:
    data = write_files(tmp_path / "in", files=5, of_each=20)
    publication, _ = score_data(served.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP)
    names = read_manifest(str(tmp_path / "out"), publication).files
    assert sum(name.startswith("part-") for name in names) == 1
    assert table_of(tmp_path / "out", publication).num_rows == 100


def test_the_quarantine_reads_what_was_set_aside(tmp_path: Path) -> None:
    bad = [quarantine.BadRow("a.csv", 3, "x", "not number", "z" * 1000)]
    (tmp_path / "aside.parquet").write_bytes(quarantine.to_parquet(bad))
    assert pq.read_table(tmp_path / "aside.parquet")["raw"].to_pylist() == ["z" * quarantine.RAW_CHARACTERS]


@pytest.mark.prove
def test_texts_are_scored_file_by_file_without_class_folders(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    words = {"cats": ["purr", "fur", "whiskers"], "cars": ["wheel", "brake", "engine"]}
    for name, own in words.items():
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for number in range(60):
            (folder / f"{number}.txt").write_text(" ".join([*draw.choice(own, 3), *draw.choice(list("abcdef"), 4)]))
    prepare(tmp_path / "prepared", str(tmp_path / "train"), "", DataConfig(), {}, 1)
    data = PreparedData.open(tmp_path / "prepared")
    trained = ToyTrained(data.signature, build_model(ModelConfig(arguments={"hidden": [8]}), data.signature, seed=0))
    engine.export(tmp_path / "package", cast(TrainedModel, trained), data, ExportConfig(seconds=0.5), {})
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("purr wheel")
    (folder / "empty.txt").write_text(" ")
    config, reading = ScoringConfig(), DataConfig(quarantine_limit=0.5)
    package_uri, output = str(tmp_path / "package"), tmp_path / "out"
    publication, _ = score_data("", str(folder), str(output), reading, config, package=package_uri)
    assert manifest_of(output, publication).by == PREPARED
    table = table_of(output, publication)
    assert table.column_names == ["file", "row", "label", "probability_cars", "probability_cats", "model_version"]
    assert table["file"].to_pylist() == ["0.txt", "1.txt", "2.txt"]
    tokens = tokenise_texts(pa.array(["purr wheel"]), data.signature.inputs[0].shape[1])[:, None]
    with torch.inference_mode():
        expected = trained.load()(torch.from_numpy(tokens)).softmax(1)[0].numpy()
    assert np.abs(table["probability_cats"].to_numpy() - expected[1]).max() < 1e-5
    # The same text as a column of a table.
    pd.DataFrame({"text": ["purr wheel"], "n": [1]}).to_csv(tmp_path / "texts.csv", index=False)
    again, _ = score_data(
        "", str(tmp_path / "texts.csv"), str(output), DataConfig(), ScoringConfig(keep=["n"]), package_uri
    )
    assert table_of(output, again)["probability_cats"].to_pylist() == table["probability_cats"].to_pylist()[:1]


@pytest.mark.prove
def test_arrays_and_the_digits_are_scored_row_by_row(tmp_path: Path) -> None:
    prepare(tmp_path / "prepared", "", "", DataConfig(), {}, 1)
    data = PreparedData.open(tmp_path / "prepared")
    model = package(tmp_path / "package", data, steps=60)
    pixels, labels = load_digits()
    np.savez(tmp_path / "some.npz", images=pixels[:100, 0], labels=labels[:100])
    of_arrays, _ = score_data(
        "", str(tmp_path / "some.npz"), str(tmp_path / "a"), DataConfig(), ScoringConfig(), str(model)
    )
    of_digits, _ = score_data("", "", str(tmp_path / "d"), DataConfig(), ScoringConfig(), str(model))
    some, every = table_of(tmp_path / "a", of_arrays), table_of(tmp_path / "d", of_digits)
    assert some["row"].to_pylist() == list(range(1, 101)) and set(some["file"].to_pylist()) == {"some.npz"}
    assert every.num_rows == len(labels) and every["label"].to_pylist()[:100] == some["label"].to_pylist()
    right = np.array(every["label"].to_pylist()) == labels.astype(str)
    assert right.mean() > 0.5


def test_a_model_that_is_signed_is_scored_with_by_its_signers_key_alone(served: Registry, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(served.uri).parent / "package", model)
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    for number, key in enumerate(keys):
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (tmp_path / f"private-{number}.pem").write_bytes(private)
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"public-{number}.pem").write_bytes(public)
    sign_package(model, tmp_path / "private-0.pem")
    data, output = write_files(tmp_path / "in", files=1, of_each=100), str(tmp_path / "out")
    other = replace(KEEP, public_key=str(tmp_path / "public-1.pem"))
    with refuses(UserError):
        score_data("", str(data), output, DataConfig(), other, str(model))
    _, new = score_data(
        "", str(data), output, DataConfig(), replace(KEEP, public_key=str(tmp_path / "public-0.pem")), str(model)
    )
    _, again = score_data("", str(data), output, DataConfig(), KEEP, str(model))
    assert (new, again) == (True, False), "the key that was looked at changes nothing of the table"


@pytest.mark.prove
def test_in_a_store_it_is_the_same_table(served: Registry, tmp_path: Path, store: FaultyS3) -> None:
    data = write_files(tmp_path / "in", files=2, of_each=200)
    for path in [*data.iterdir(), *Path(served.uri).rglob("*")]:
        if path.is_file():
            key = path.relative_to(data.parent if data in path.parents else Path(served.uri).parent)
            s3.client().put_object(Bucket="bucket", Key=f"{tmp_path.name}/{key}", Body=path.read_bytes())
    prefix = f"s3://bucket/{tmp_path.name}"
    publication, new = score_data(f"{prefix}/registry", f"{prefix}/in", f"{prefix}/out", DataConfig(), KEEP)
    assert new and not score_data(f"{prefix}/registry", f"{prefix}/in", f"{prefix}/out", DataConfig(), KEEP)[1]
    there = fetch_table(f"{prefix}/out", publication, tmp_path / "there")
    here, _ = score_data(served.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP)
    parts = [name for name in there.files if name.startswith("part-")]
    assert parts and parts == [name for name in read_manifest(str(tmp_path / "out"), here).files if "part-" in name]
    with refuses(UserError):
        score_data(served.uri, str(tmp_path / "**/*.parquet"), str(tmp_path / "out"), DataConfig(), KEEP)
    store.requests.clear()
    store.ignores_conditions = True
    with refuses(UserError, match=f"^{prefix}/other:"):
        score_data(f"{prefix}/registry", f"{prefix}/in", f"{prefix}/other", DataConfig(), KEEP)
    assert not [line for line in store.requests if "part-" in line], "nothing was scored"


def test_tables_of_earlier_releases_are_found_under_their_keys() -> None:
    assert table_key("d", "m", DataConfig(format="csv"), ScoringConfig()) == "e5efc427fb53155d"
    assert table_key("d", "m", DataConfig(format="csv", dates="day-first"), ScoringConfig()) != "e5efc427fb53155d"
