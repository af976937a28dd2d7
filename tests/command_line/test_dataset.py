"""Tables from a user's own task: a DataFrame, a StructuredDataset, or a Parquet file."""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.datasets import list_parquet, undeclared_columns
from tests.support import REPOSITORY
from tests.support.command_line import Run, one_message, run_process
from tests.support.wording import refuses

UPSTREAM = """
from typing import Annotated

import pandas as pd
from flytekit import StructuredDataset, kwtypes, task, workflow

from slipstream.shared.errors import UserError
from slipstream.pipeline.report.summary import DataSummary
from workflows.training import prepare_dataset

@task
def as_frame(rows: int) -> pd.DataFrame:
    return pd.read_pickle("frame.pkl")[:rows]

@task
def as_dataset(rows: int) -> StructuredDataset:
    return StructuredDataset(dataframe=pd.read_pickle("frame.pkl")[:rows])

@task
def as_csv(rows: int) -> Annotated[StructuredDataset, "csv"]:
    return StructuredDataset(dataframe=pd.read_pickle("frame.pkl")[:rows])

@task
def as_two(rows: int) -> Annotated[StructuredDataset, kwtypes(x=float, y=str)]:
    return StructuredDataset(dataframe=pd.read_pickle("frame.pkl")[:rows])

@task
def as_other(rows: int) -> Annotated[pd.DataFrame, kwtypes(z=float, y=str)]:
    return pd.read_pickle("frame.pkl")[:rows]

@workflow
def frame(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_frame(rows=rows), target="y")

@workflow
def dataset(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_dataset(rows=rows), target="y")

@workflow
def csv(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_csv(rows=rows), target="y")

@workflow
def two(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_two(rows=rows), target="y")

@workflow
def other(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_other(rows=rows), target="y")

if __name__ == "__main__":
    for upstream, rows in ((frame, 400), (dataset, 400), (frame, 300), (csv, 300), (two, 200), (other, 200)):
        print(f"# {upstream.__name__}, {rows} rows", flush=True)
        try:
            print(upstream(rows=rows), flush=True)
        except UserError as error:
            print(error.message)
"""


def table() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"x": draw.normal(size=400), "c": draw.choice(list("abc"), 400)})
    return frame.assign(y=np.where(frame["x"] > 0, "yes", "no"))


def test_what_a_task_returns_is_prepared_and_found_again_by_its_rows(tmp_path: Path) -> None:
    table().to_pickle(tmp_path / "frame.pkl")
    (tmp_path / "upstream.py").write_text(UPSTREAM)
    said = run_process([sys.executable, "upstream.py"], tmp_path, {"PYTHONPATH": str(REPOSITORY)})
    assert said.returncode == 0, said.stdout
    first, again, other, refused, two, absent = said.stdout.split("# ")[-6:]
    assert "400 rows read, 400 kept" in first and "reused" not in first, first
    assert "prepare      reused" in again, again
    assert "300 rows read" in other and "reused" not in other, other
    assert "is not Parquet but csv" in refused and len(refused.splitlines()) == 2, refused
    assert "200 rows read" in two and "'c'" not in two, two
    cards = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/prepared/card.json")]
    (card,) = (card for card in cards if card["rows"]["read"] == 200)
    assert {column["name"]: column["role"] for column in card["columns"]} == {
        "x": "numeric",
        "y": "target",
        "c": "dropped",
    }
    assert "declares the column 'z'" in absent and len(absent.splitlines()) == 2, absent


def test_a_file_is_handed_over_on_the_command_line(pyflyte_run: Run, tmp_path: Path) -> None:
    table().to_parquet(tmp_path / "some.parquet")
    made = pyflyte_run("--dataset", "some.parquet", "--target", "y", workflow="prepare_dataset")
    assert made.returncode == 0 and "Slipstream  some.parquet → y" in made.stdout, made.stdout
    table().to_csv(tmp_path / "some.csv")
    refused = pyflyte_run("--dataset", "some.csv", "--target", "y", workflow="train_on_dataset")
    assert refused.returncode == 1 and "some.csv' is not Parquet but csv" in one_message(refused.stdout)
    absent = pyflyte_run("--dataset", "absent.parquet", "--target", "y", workflow="train_on_dataset")
    assert absent.returncode == 1 and "--dataset: 'absent.parquet' does not exist" in one_message(absent.stdout)


def test_only_parquet_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    table().to_parquet(tmp_path / "00000")
    assert list_parquet(str(tmp_path), "parquet").address == str(tmp_path)
    assert list_parquet(str(tmp_path), "").address == str(tmp_path)
    table().to_feather(tmp_path / "more.parquet")
    with pytest.raises(UserError, match="not Parquet but arrow"):
        list_parquet(str(tmp_path), "parquet")
    (tmp_path / "more.parquet").write_bytes(b"x,y\n")
    with pytest.raises(UserError, match="not Parquet but "):
        list_parquet(str(tmp_path), "")
    with pytest.raises(UserError, match="not Parquet but avro"):
        list_parquet(str(tmp_path), "avro")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="/empty"):
        list_parquet(str(tmp_path / "empty"), "parquet")


def test_a_type_with_columns_names_all_that_are_used(tmp_path: Path) -> None:
    (tmp_path / "t/year=2020").mkdir(parents=True)
    table().to_parquet(tmp_path / "t/year=2020/0.parquet")
    listing = list_parquet(str(tmp_path / "t"), "")
    assert undeclared_columns(listing, ["y", "x"], "y", DataConfig()) == ["c", "year"]
    assert undeclared_columns(listing, ["year", "x", "y"], "y", DataConfig(group="year")) == ["c"]
    assert undeclared_columns(listing, ["x", "y", "c", "year"], "", DataConfig()) == []
    with refuses(UserError, match="^dataset: "):
        undeclared_columns(listing, ["x", "y", "month"], "y", DataConfig())
    with refuses(UserError, match="^target: "):
        undeclared_columns(listing, ["x", "c"], "y", DataConfig())
    for setting in ("id", "group", "time", "weight"):
        with refuses(UserError, match=f"^data.{setting}: "):
            undeclared_columns(listing, ["x", "y"], "y", DataConfig.from_dict({setting: "year"}))
