"""Columns that only number the rows: indices without a name are dropped, other ordered columns are reported."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from slipstream.pipeline.prepare.fit.scan_result import RowOrder
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.source.config import DataConfig
from tests.support.proving import diagonal
from tests.support.shares import on_several
from tests.support.tables import Prepare, with_types

ROWS = 900
SUFFIXES = ["csv", "parquet", "arrow", "jsonl"]
NAMES = ["__index_level_0__", "__index_level_1__", "Unnamed: 0", "unnamed: 0", "Unnamed: 0.1"]


def frame() -> pd.DataFrame:
    """Rows sorted by class; only their position tells the class."""
    draw = np.random.default_rng(2)
    return pd.DataFrame({"x": draw.normal(size=ROWS), "y": np.repeat(["a", "b", "c"], ROWS // 3)})


def write(table: pd.DataFrame, path: Path, group: int = 200) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        table.to_parquet(path, index=False, row_group_size=group)
    elif path.suffix == ".arrow":
        feather.write_feather(pa.Table.from_pandas(table, preserve_index=False), str(path), chunksize=group)
    else:
        table.to_json(path, orient="records", lines=True)
    return path


def rows_of(data: PreparedData) -> list[bytes]:
    return [data.split(split).tobytes() for split in SPLITS]


def mentions(data: PreparedData, name: str) -> list[str]:
    return [word for word in data.card["warnings"] if repr(name) in word]


@pytest.mark.parametrize(("suffix", "name"), diagonal(SUFFIXES, NAMES))
def test_an_index_without_a_name_is_dropped(prepared: Prepare, tmp_path: Path, suffix: str, name: str) -> None:
    without = prepared(write(frame(), tmp_path / f"without.{suffix}"))
    indexed = frame()
    indexed.insert(1, name, np.arange(ROWS) * 1.0)
    data = prepared(write(indexed, tmp_path / f"with.{suffix}"))
    assert with_types(data)[name] == ("other", "dropped") and len(mentions(data, name)) == 1
    assert rows_of(data) == rows_of(without)
    assert data.artifact.read_json("statistics.json") == without.artifact.read_json("statistics.json")
    kept = prepared(tmp_path / f"with.{suffix}", id=name)
    assert with_types(kept)[name][1] == "identifier" and not mentions(kept, name)
    learned = prepared(tmp_path / f"with.{suffix}", types={name: "number"})
    assert with_types(learned)[name][1] == "numeric"


@pytest.mark.parametrize("name", ["", "Unnamed: 7", "unnamed: 3"])
def test_a_first_column_without_a_name_is_an_index(prepared: Prepare, name: str) -> None:
    texts = ",".join([name, "x", "y"]) + "\n" + frame().to_csv(header=False)
    data = prepared(texts)
    assert sorted(role for _, role in with_types(data).values()) == ["dropped", "numeric", "target"]
    assert rows_of(data) == rows_of(prepared(frame().to_csv(index=False)))


def test_other_columns_without_a_name_are_columns(prepared: Prepare) -> None:
    draw = np.random.default_rng(3)
    other = frame().assign(z=draw.normal(size=ROWS), w=draw.normal(size=ROWS))
    data = prepared(other.to_csv(index=False, header=False), header=False, columns=["Unnamed: 0", "y", "a", "b"])
    assert with_types(data)["Unnamed: 0"][1] == "numeric"
    data = prepared("x,y,,Unnamed: 7\n" + other.to_csv(index=False, header=False))
    assert [with_types(data)[name][1] for name in ("unnamed_3", "Unnamed: 7")] == ["numeric"] * 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_index_may_be_in_some_files_only(prepared: Prepare, tmp_path: Path, suffix: str) -> None:
    half = frame().iloc[ROWS // 2 :].assign(__index_level_0__=np.arange(ROWS // 2))
    write(frame().iloc[: ROWS // 2], tmp_path / f"some/0.{suffix}")
    write(half, tmp_path / f"some/1.{suffix}")
    write(half, tmp_path / f"turned/0.{suffix}")
    write(frame().iloc[: ROWS // 2], tmp_path / f"turned/1.{suffix}")
    for folder in ("some", "turned"):
        data = prepared(tmp_path / folder)
        assert with_types(data)["__index_level_0__"] == ("other", "dropped")
        assert data.card["rows"] | {"read": 0} == {**data.card["rows"], "read": 0, "kept": ROWS, "quarantined": 0}


def test_a_base_set_goes_on_with_and_without_its_index(prepared: Prepare, tmp_path: Path) -> None:
    indexed, plain = frame().assign(**{"Unnamed: 0": range(ROWS)}), frame()
    for first, then in ((indexed, plain), (plain, indexed)):
        base = prepared(write(first, tmp_path / f"{len(first.columns)}/a.csv"))
        write(then.assign(x=-then["x"]), tmp_path / f"{len(first.columns)}/b.csv")
        data = prepared(tmp_path / f"{len(first.columns)}", earlier=str(base.artifact.directory))
        assert data.card["rows"]["kept"] == 2 * ROWS


# Ordered columns


def numbered(gap: bool = True, descending: bool = False, pieces: int = 1, start: int = 0) -> pd.DataFrame:
    """A frame whose column ``ticket`` numbers the rows in steps, with one gap, from the start in every piece."""
    number = np.concatenate([start + 3.0 * np.arange(ROWS // pieces)] * pieces)
    number = number[::-1].copy() if descending else number
    if gap:
        number[ROWS // 2 + 7] = np.nan
    return frame().assign(ticket=number)


CASES: dict[str, dict[str, Any]] = {
    "a gap": {},
    "descending": {"descending": True},
    "concatenated": {"pieces": 3},
    "complete": {"gap": False, "start": 10**6},
}


@pytest.mark.parametrize(("suffix", "case"), diagonal(SUFFIXES, CASES))
def test_a_column_in_the_order_of_the_rows_is_reported_and_stays(
    prepared: Prepare, tmp_path: Path, suffix: str, case: str
) -> None:
    path = write(numbered(**CASES[case]), tmp_path / f"t.{suffix}")
    data = prepared(path)
    assert with_types(data)["ticket"][1] == "numeric"
    (warned,) = (word for word in mentions(data, "ticket") if "ordered" in word)
    alone = next(column["alone"] for column in data.card["columns"] if column["name"] == "ticket")
    assert f"{alone:.1%}" in warned and (alone > 0.9) == (case != "concatenated")
    assert not [word for word in mentions(data, "x") if "ordered" in word]
    several = PreparedData.open(on_several(tmp_path / "pods", str(path), 3, DataConfig()).directory)
    assert several.card["warnings"] == data.card["warnings"] and rows_of(several) == rows_of(data)


def test_order_counts_within_every_file(prepared: Prepare, tmp_path: Path) -> None:
    for number in range(4):
        write(numbered().iloc[number * 200 : number * 200 + 200], tmp_path / f"in/{3 - number}.parquet")
    assert [word for word in mentions(prepared(tmp_path / "in"), "ticket") if "ordered" in word]


def test_columns_that_are_not_ordered_are_not_reported(prepared: Prepare) -> None:
    draw = np.random.default_rng(5)
    table = frame().assign(
        shuffled=draw.permutation(ROWS) * 3,
        few=np.arange(ROWS) // 30,
        real=np.sort(draw.normal(size=ROWS)),
        late=np.where(np.arange(ROWS) < 300, np.arange(ROWS) * 2, draw.integers(0, 10**6, ROWS)),
    )
    assert not [word for word in prepared(table.to_csv(index=False)).card["warnings"] if "ordered" in word]


def test_the_order_is_that_of_all_rows_however_they_are_cut() -> None:
    """Against a count over the whole column."""
    draw = np.random.default_rng(6)
    columns = [
        draw.integers(0, 9, 500) * 1.0,
        np.arange(500.0),
        np.where(draw.random(500) < 0.2, np.nan, np.arange(500.0)),
    ]
    for cuts in ([0, 500], [0, 1, 2, 400, 500], [0, 0, 250, 251, 500]):
        parts = [[column[a:b] for column in columns] for a, b in itertools.pairwise(cuts)]
        merged = RowOrder.nothing(3)
        for part in parts:
            merged = merged.merge(RowOrder.nothing(3).then(part))
        for column, (up, down, steps) in zip(columns[1:], merged.steps[1:], strict=True):
            differences = np.diff(column[~np.isnan(column)])
            assert (up, down, steps) == ((differences > 0).sum(), (differences < 0).sum(), len(differences))
        assert merged.ordered().tolist() == [False, True, True]
