"""Gaps, floats and absent columns have the same meaning in every format; expected scores are ONNX Runtime's."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.publish import score_data
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from tests.support.proving import diagonal
from tests.support.scoring import by_hand, rows, scored

FORMATS = ("csv", "parquet", "arrow", "jsonl")
COLUMNS = ("age", "visits", "member", "when", "city")


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame; Parquet and Arrow keep NaN as NaN, as other writers than pandas do."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True, date_format="iso", date_unit="us", double_precision=15)
    else:
        floats = {name: pa.array(frame[name].to_numpy()) for name in frame if frame[name].dtype == np.float64}
        plain = pa.Table.from_pandas(frame, preserve_index=False)
        table = pa.table({name: floats.get(name, plain[name]) for name in frame})
        pq.write_table(table, path) if path.suffix == ".parquet" else feather.write_feather(table, str(path))


def check(registry: Registry, frame: pd.DataFrame, tmp_path: Path, format: str) -> None:
    write(frame, tmp_path / f"in/rows.{format}")
    found = scored(registry, tmp_path / "in", tmp_path / "out")
    assert found["id"].to_pylist() == frame["id"].tolist(), "every row is scored, none quarantined"
    difference = np.abs(found["probability_yes"].to_numpy() - by_hand(registry, frame)[:, 1]).max()
    assert difference < (1e-5 if format == "jsonl" else 1e-6)  # pandas writes 15 digits into JSON


def gaps_in_integers(frame: pd.DataFrame) -> None:
    frame.loc[3::7, "visits"] = np.nan


def gaps_in_booleans(frame: pd.DataFrame) -> None:
    frame["member"] = frame["member"].astype(float)
    frame.loc[3::7, "member"] = np.nan


def booleans_and_none(frame: pd.DataFrame) -> None:
    frame["member"] = frame["member"].astype(object)
    frame.loc[3::7, "member"] = None


def fractions_of_integers(frame: pd.DataFrame) -> None:
    frame["visits"] = frame["visits"] + 0.5


def nothing_in_any_column(frame: pd.DataFrame) -> None:
    for name in COLUMNS:
        frame[name] = np.nan


@pytest.mark.parametrize(
    ("format", "change"),
    diagonal(
        FORMATS, [gaps_in_integers, gaps_in_booleans, booleans_and_none, fractions_of_integers, nothing_in_any_column]
    ),
)
def test_gaps_and_floats_are_scored(served: Registry, tmp_path: Path, change: Any, format: str) -> None:
    frame = rows(60)
    change(frame)
    check(served, frame, tmp_path, format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_single_row_with_gaps_is_scored(served: Registry, tmp_path: Path, format: str) -> None:
    frame = rows(1)
    frame["age"] = frame["member"] = np.nan
    check(served, frame, tmp_path, format)


def test_a_key_that_some_records_lack_is_missing(served: Registry, tmp_path: Path) -> None:
    frame = rows(40)
    write(frame, tmp_path / "in/rows.jsonl")
    lines = (tmp_path / "in/rows.jsonl").read_text().splitlines()
    lines[5] = lines[5].replace('"visits":', '"calls":')
    (tmp_path / "in/rows.jsonl").write_text("\n".join(lines) + "\n")
    frame.loc[5, "visits"] = np.nan
    found = scored(served, tmp_path / "in", tmp_path / "out")["probability_yes"].to_numpy()
    assert np.abs(found - by_hand(served, frame)[:, 1]).max() < 1e-5


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["visits", "id"])
def test_one_of_two_files_without_a_column_is_refused_by_name(
    served: Registry, tmp_path: Path, format: str, name: str
) -> None:
    write(rows(30), tmp_path / f"in/0.{format}")
    write(rows(30).drop(columns=name), tmp_path / f"in/1.{format}")
    with pytest.raises(UserError, match=rf"1\.{format}: .*'{name}', "):
        score_data(served.uri, str(tmp_path / "in"), str(tmp_path / "out"), DataConfig(), ScoringConfig(keep=["id"]))
    assert not list((tmp_path / "out").glob("published/*"))


@pytest.mark.parametrize("format", ["csv", "parquet", "arrow", "jsonl"])
def test_other_numbers_than_0_and_1_are_not_booleans(served: Registry, tmp_path: Path, format: str) -> None:
    frame = rows(200)
    frame["member"] = frame["member"].astype(float)
    frame.loc[7, "member"] = 0.5
    write(frame, tmp_path / f"in/rows.{format}")
    found = scored(served, tmp_path / "in", tmp_path / "out")
    good = frame.drop(index=7)
    assert found["id"].to_pylist() == good["id"].tolist()
    assert np.abs(found["probability_yes"].to_numpy() - by_hand(served, good)[:, 1]).max() < 1e-5
