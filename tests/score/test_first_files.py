"""Files with values decide kept types, dropped columns may be absent, and rows are numbered alike in all formats."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from tests.support.proving import diagonal, first_few
from tests.support.raw_tables import mixed_frame
from tests.support.scoring import by_hand, rows, scored
from tests.support.wording import refuses

KEPT = ScoringConfig(keep=["code"])


@pytest.mark.parametrize(
    "first",
    [
        pa.array([], pa.string()),
        pa.array([], pa.float64()),
        pa.array([None] * 5, pa.float64()),
        pa.array([np.nan] * 5, pa.float64()),
        pa.array([None] * 5, pa.string()),
        pa.nulls(5),
    ],
    ids=str,
)
def test_a_file_without_values_does_not_decide_a_kept_type(served: Registry, tmp_path: Path, first: pa.Array) -> None:
    (tmp_path / "in").mkdir()
    frame = rows(20)
    plain = pa.Table.from_pandas(frame, preserve_index=False)
    codes = pa.array([2**60 + 1 + index for index in range(10)] + [None] * 10)
    pq.write_table(plain.slice(0, len(first)).append_column("code", first), tmp_path / "in/0.parquet")
    pq.write_table(plain.append_column("code", codes), tmp_path / "in/1.parquet")
    found = scored(served, tmp_path / "in", tmp_path / "out", KEPT)
    assert found["code"].type == pa.int64()
    assert found["code"].to_pylist() == [None] * len(first) + codes.to_pylist()


@pytest.mark.parametrize("format", first_few(["csv", "parquet", "arrow", "jsonl"], 1))
def test_tables_without_kept_columns_have_file_and_row(served: Registry, tmp_path: Path, format: str) -> None:
    folder = tmp_path / "in" / "day=1"
    folder.mkdir(parents=True)
    frames = [rows(200, seed=1), rows(100, seed=2)]
    frames[0].loc[7, "age"] = np.inf
    for number, frame in enumerate(frames):
        path = folder / f"{number}.{format}"
        if format == "csv":
            frame.to_csv(path, index=False)
        elif format == "jsonl":
            # JSON has no infinity.
            text = frame.replace(np.inf, 1e300).to_json(orient="records", lines=True, date_format="iso")
            path.write_text(f"\n{text}")
        elif format == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_feather(path)
    found = scored(served, tmp_path / "in", tmp_path / "out", ScoringConfig())
    assert found.column_names[:3] == ["file", "row", "label"]
    expected = [(0, row) for row in range(1, 201) if row != 8] + [(1, row) for row in range(1, 101)]
    names = [(f"day=1/{number}.{format}", row) for number, row in expected]
    assert list(zip(found["file"].to_pylist(), found["row"].to_pylist(), strict=True)) == names
    scores = [by_hand(served, frame.iloc[[row - 1]])[0, 1] for frame, row in ((frames[n], r) for n, r in expected[:20])]
    assert np.abs(found["probability_yes"].to_numpy()[:20] - scores).max() < 1e-5


def test_a_bad_record_keeps_its_number(served: Registry, tmp_path: Path) -> None:
    frame = rows(200)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    lines[3] += ",too,wide"
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    found = scored(served, tmp_path / "rows.csv", tmp_path / "out", ScoringConfig())
    assert found["row"].to_pylist() == [1, 2, *range(4, 201)]


@pytest.mark.parametrize(("format", "where"), diagonal(["csv", "parquet", "jsonl"], [0, 1]))
def test_a_dropped_column_may_be_absent(tmp_path: Path, format: str, where: int) -> None:
    frame = mixed_frame(600, "classification")
    parts = [frame.iloc[:300], frame.iloc[300:]]
    note = pd.Series([f"note {index}" if index % 2 else None for index in range(300)])
    for kind in ("with", "without"):
        (tmp_path / kind).mkdir()
        for number, part in enumerate(parts):
            part = part.assign(note=note.to_numpy()) if kind == "with" and number == where else part
            path = tmp_path / kind / f"{number}.{format}"
            if format == "csv":
                part.to_csv(path, index=False)
            elif format == "jsonl":
                part.to_json(path, orient="records", lines=True, date_format="iso", date_unit="us")
            else:
                part.to_parquet(path, index=False)
    prepare(tmp_path / "a", str(tmp_path / "with"), "y", DataConfig(drop=["note"]), {})
    prepare(tmp_path / "b", str(tmp_path / "without"), "y", DataConfig(), {})
    one, other = PreparedData.open(tmp_path / "a"), PreparedData.open(tmp_path / "b")
    for split in ("train", "validation", "test"):
        assert np.array_equal(one.split(split), other.split(split))


def test_a_dropped_column_that_no_file_has_is_refused(tmp_path: Path) -> None:
    mixed_frame(60, "classification").to_csv(tmp_path / "rows.csv", index=False)
    with refuses(UserError):
        prepare(tmp_path / "a", str(tmp_path / "rows.csv"), "y", DataConfig(drop=["ages"]), {})
