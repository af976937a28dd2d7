"""Tables from a user's own task: a DataFrame, a StructuredDataset, or a Parquet file."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.source.files import parquet_address
from tests.support import REPOSITORY
from tests.support.command_line import Run, one_message, run_process

UPSTREAM = """
from typing import Annotated

import pandas as pd
from flytekit import StructuredDataset, task, workflow

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

@workflow
def frame(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_frame(rows=rows), target="y")

@workflow
def dataset(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_dataset(rows=rows), target="y")

@workflow
def csv(rows: int) -> DataSummary:
    return prepare_dataset(dataset=as_csv(rows=rows), target="y")

if __name__ == "__main__":
    for upstream, rows in ((frame, 400), (dataset, 400), (frame, 300), (csv, 300)):
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
    first, again, other, refused = said.stdout.split("# ")[-4:]
    assert "400 rows read, 400 kept" in first and "reused" not in first, first
    assert "prepare      reused" in again, again
    assert "300 rows read" in other and "reused" not in other, other
    assert "is not Parquet but csv" in refused and len(refused.splitlines()) == 2, refused


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
    assert parquet_address(str(tmp_path), "parquet") == str(tmp_path)
    assert parquet_address(str(tmp_path), "") == str(tmp_path)
    table().to_feather(tmp_path / "more.parquet")
    with pytest.raises(UserError, match="not Parquet but arrow"):
        parquet_address(str(tmp_path), "parquet")
    (tmp_path / "more.parquet").write_bytes(b"x,y\n")
    with pytest.raises(UserError, match="not Parquet but "):
        parquet_address(str(tmp_path), "")
    with pytest.raises(UserError, match="not Parquet but avro"):
        parquet_address(str(tmp_path), "avro")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="/empty"):
        parquet_address(str(tmp_path / "empty"), "parquet")
