"""A DataFrame in Python is the same data as its file."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.resolve import frame_file
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from tests.support.wording import refuses


def frame(rows: int = 400) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "x": draw.normal(size=rows),
            "city": pd.Categorical(draw.choice(["Oslo", "Rome"], rows)),
            "when": pd.date_range("2024-01-01", periods=rows, freq="h", tz="Europe/Oslo"),
            "flag": draw.choice([True, False], rows),
            "y": draw.choice(["a", "b"], rows),
        }
    )


def test_a_frame_gives_the_bytes_of_its_file(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pandas(frame()), tmp_path / "t.parquet")
    filed = prepare(tmp_path / "filed", str(tmp_path / "t.parquet"), "y", DataConfig(), {})
    for number, data in enumerate((frame(), pa.Table.from_pandas(frame()))):
        handed = prepare(tmp_path / str(number), data, "y", DataConfig(), {})
        for name in ("train-00000.rows", "test-00000.rows", "statistics.json", "quarantine.parquet"):
            assert handed.files[name].sha256 == filed.files[name].sha256, name
    assert PreparedData.open(tmp_path / "0").card["source"].startswith("frame-")


def test_equal_frames_are_one_file_and_others_are_not(tmp_path: Path) -> None:
    one, same = frame_file(frame(), tmp_path / "frames"), frame_file(frame(), tmp_path / "frames")
    other = frame_file(frame().assign(x=0.0), tmp_path / "frames")
    assert one == same != other
    assert len(list((tmp_path / "frames").iterdir())) == 2
    assert (
        fingerprint_source(list_source(one), "y")
        == fingerprint_source(list_source(same), "y")
        != fingerprint_source(list_source(other), "y")
    )


def test_an_index_that_says_something_is_a_column(tmp_path: Path) -> None:
    table = pq.read_table(frame_file(frame().set_index("city"), tmp_path))
    assert set(table.column_names) == {"x", "when", "flag", "y", "city"}
    assert set(pq.read_table(frame_file(frame(), tmp_path)).column_names) == set(frame().columns)


@pytest.mark.parametrize(
    "data",
    [
        pd.DataFrame({"x": [1, "a"], "y": [0, 1]}),
        pd.DataFrame([[1, 2, 0], [3, 4, 1]], columns=["x", "x", "y"]),
        [1, 2, 3],
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, data: object) -> None:
    with refuses(UserError) as caught:
        prepare(tmp_path / "p", data, "y", DataConfig(), {})
    assert "\n" not in caught.value.message
