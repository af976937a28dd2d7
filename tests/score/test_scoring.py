"""What is published: what the model says of every row, whatever the rows are stored as and whoever scored them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from slipstream.export.package.raw_columns import RawColumns, read_columns
from slipstream.promote.store import Registry
from slipstream.score.config import ScoringConfig
from slipstream.score.engine import score
from slipstream.score.model import PREPARED, RAW
from slipstream.score.publish import publications, read_manifest
from slipstream.source import quarantine
from slipstream.source.config import DataConfig
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.raw_tables import as_raw
from tests.support.scoring import KEEP, bytes_below, in_shares, manifest_of, rows, scored, table_of, write_files
from tests.support.toys import images

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
    assert set(table["model_version"].to_pylist()) == {served.promoted().version}  # type: ignore[union-attr]


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".jsonl", ".arrow"])
def test_the_format_makes_no_difference(served: Registry, frame: pd.DataFrame, tmp_path: Path, suffix: str) -> None:
    expected = scored(served, write(frame, tmp_path / "parquet", ".parquet"), tmp_path / "one")
    table = scored(served, write(frame, tmp_path / "other", suffix), tmp_path / "two")
    assert table["id"].equals(expected["id"]) and table["label"].equals(expected["label"])
    close = np.abs(table["probability_yes"].to_numpy() - expected["probability_yes"].to_numpy()).max()
    assert close < (1e-5 if suffix == ".jsonl" else 1e-6)  # pandas writes 15 digits into JSON


def test_a_regression_has_values(regression: Registry, frame: pd.DataFrame, tmp_path: Path) -> None:
    table = scored(regression, write(frame, tmp_path / "in", ".csv"), tmp_path / "out")
    assert table.column_names == ["id", "value", "model_version"]
    age = frame["age"].to_numpy()
    known = ~np.isnan(age)
    assert np.corrcoef(table["value"].to_numpy()[known], age[known])[0, 1] > 0.5


def test_the_preparation_stands_in_where_the_raw_model_cannot(
    without_marks: Registry, served: Registry, frame: pd.DataFrame, tmp_path: Path
) -> None:
    data = write(frame, tmp_path / "in", ".parquet")
    publication, _ = score(without_marks.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP)
    other, _ = score(served.uri, str(data), str(tmp_path / "other"), DataConfig(), KEEP)
    assert manifest_of(tmp_path / "out", publication).by == PREPARED
    assert manifest_of(tmp_path / "other", other).by == RAW
    table, raw = table_of(tmp_path / "out", publication), table_of(tmp_path / "other", other)
    same = np.mean(np.array(table["label"].to_pylist()) == np.array(raw["label"].to_pylist()))
    assert same > 0.98  # two trainings on the same rows


def test_images_are_scored_file_by_file(tmp_path: Path) -> None:
    from PIL import Image

    data = images(tmp_path / "prepared")
    registry = Registry(str(tmp_path / "registry"))
    put(package(tmp_path / "package", data), registry, data)
    folder = tmp_path / "in"
    folder.mkdir()
    for place, name in enumerate(("left", "middle", "right")):
        pixels = np.full((9, 9), 3, np.uint8)
        pixels[:, 3 * place : 3 * place + 3] = 11
        Image.fromarray(pixels).save(folder / f"{name}.png")
    (folder / "torn.png").write_bytes((folder / "left.png").read_bytes()[:40])
    table = scored(registry, folder, tmp_path / "out", ScoringConfig(), quarantine_limit=0.5)
    found = dict(zip(table["file"].to_pylist(), table["label"].to_pylist(), strict=True))
    assert found == {"left.png": "left", "middle.png": "middle", "right.png": "right"}
    assert table.column_names[:3] == ["file", "row", "label"]


def test_one_two_and_four_pods_write_the_same_bytes(
    served: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.score.plan.PART_BYTES", 40_000)
    data = write_files(tmp_path / "in", files=7, of_each=400)
    outputs = {number: tmp_path / f"out-{number}" for number in (1, 2, 4)}
    found = {number: in_shares(served, data, output, number) for number, output in outputs.items()}
    assert len({publication.manifest for publication in found.values()}) == 1
    files = {number: bytes_below(output) for number, output in outputs.items()}
    assert files[1] == files[2] == files[4] and sum("part-" in name for name in files[1]) == 7
    again = score(served.uri, str(data), str(tmp_path / "processes"), DataConfig(), KEEP, workers=3)[0]
    assert again.manifest == found[1].manifest


def test_a_table_is_published_once(served: Registry, tmp_path: Path) -> None:
    data, output = write_files(tmp_path / "in", files=2, of_each=300), tmp_path / "out"
    first, new = score(served.uri, str(data), str(output), DataConfig(), KEEP)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    again, second = score(served.uri, str(data), str(output), DataConfig(), KEEP)
    assert (new, second, again) == (True, False, first)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()} == before
    other, new = score(served.uri, str(data), str(output), DataConfig(), replace(KEEP, keep=[]))
    assert new and other.key != first.key and (first.number, other.number) == (1, 2)
    rows(50, seed=3).to_csv(data / "02.csv", index=False)
    third, new = score(served.uri, str(data), str(output), DataConfig(), KEEP)
    assert new and [each.key for each in publications(str(output))] == [first.key, other.key, third.key]


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
    publication, _ = score(served.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP)
    table = manifest_of(tmp_path / "out", publication)
    assert (table.rows, table.scored, table.set_aside) == (1000, 997, 3)
    (aside,) = (tmp_path / "out/tables" / publication.key).glob("set-aside-*.parquet")
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
    publication, _ = score(served.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP)
    names = read_manifest(str(tmp_path / "out"), publication).files
    assert sum(name.startswith("part-") for name in names) == 1
    assert table_of(tmp_path / "out", publication).num_rows == 100


def test_the_quarantine_reads_what_was_set_aside(tmp_path: Path) -> None:
    bad = [quarantine.BadRow("a.csv", 3, "x", "not number", "z" * 1000)]
    (tmp_path / "aside.parquet").write_bytes(quarantine.to_parquet(bad))
    assert pq.read_table(tmp_path / "aside.parquet")["raw"].to_pylist() == ["z" * quarantine.RAW_CHARACTERS]
