"""Any rows are scored as the model's ONNX scores the inputs that NumPy makes of them with the stored statistics."""

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.config import DataConfig
from tests.support.formats import WRITERS, Columns
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.scoring import scored

ROWS = 30
INDEX = "Unnamed: 0"
#: Arrow types of the model's columns.
KINDS = {
    "far": pa.float64(),
    "near": pa.float64(),
    "count": pa.int64(),
    "when": pa.timestamp("us", "UTC"),
    "city": pa.string(),
}
SENTINELS = [datetime(9999, 12, 31, tzinfo=UTC), datetime(1900, 1, 1, tzinfo=UTC)]
CITIES = ["Oslo", "Rome", "Lima"]
#: Largest input of a model, in standard deviations, as the documentation states it.
FARTHEST = 1e4
MEAN = 1e9
OFFSETS = [0.0, 1e6, -1e9, 1e12]
FUZZ = settings(
    max_examples=20,
    derandomize=True,
    deadline=20_000,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def table(rows: int = 1200) -> pd.DataFrame:
    """Rows for training: a sentinel among the dates, an offset in an input and in the target, an index, gaps."""
    draw = np.random.default_rng(8)
    days = pd.Timestamp("2021-01-01", tz="UTC") + pd.to_timedelta(draw.integers(0, 900, rows), "D")
    frame = pd.DataFrame(
        {
            INDEX: np.arange(rows),
            "far": 1e12 + draw.normal(0, 50, rows).round(2),
            "near": np.where(draw.random(rows) < 0.1, np.nan, draw.normal(size=rows)),
            "count": draw.integers(0, 90, rows),
            "when": days.as_unit("us"),
            "city": draw.choice(CITIES, rows),
        }
    )
    frame.loc[::400, "when"] = pd.Timestamp(SENTINELS[0])
    signal = frame["near"].fillna(0) + (frame["city"] == "Oslo") + (frame["far"] - 1e12) / 50
    return frame.assign(y=MEAN + 20 * signal + draw.normal(size=rows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    directory = tmp_path_factory.mktemp("fuzzed")
    prepare(directory / "prepared", pa.Table.from_pandas(table(), preserve_index=False), "y", DataConfig(), {})
    data = PreparedData.open(directory / "prepared")
    registry = Registry(str(directory / "registry"))
    put(package(directory / "package", data), registry, data)
    return registry


def expected_values(package: Path, columns: Columns) -> np.ndarray:
    statistics = json.loads((package / "statistics.json").read_text())
    session = onnxruntime.InferenceSession(package / "model.onnx", providers=["CPUExecutionProvider"])
    frame = pa.table(columns).to_pandas()
    moments = columns["when"].cast(pa.int64()).to_pandas().to_numpy(np.float64) / 1e6
    numbers = {
        name: moments if name == "when" else frame[name].to_numpy(np.float64) for name in KINDS if name != "city"
    }
    inputs, indicators = [], []
    for column in statistics["numeric"]:
        x = numbers[column["name"]]
        if column["indicator"]:
            indicators.append(np.isnan(x))
        if column["part"]:
            stamps = pd.Series(columns["when"].to_pandas()).dt
            x = {"hour": stamps.hour, "weekday": stamps.weekday, "month": stamps.month - 1}[column["part"]].to_numpy(
                float
            )
        if column["curve"] == "log":
            x = np.sign(x) * np.log1p(np.abs(x) / column["scale"])
        with np.errstate(over="ignore"):
            scaled = ((x - column["mean"]) / column["std"]).astype(np.float32)
        inputs.append(np.nan_to_num(np.clip(scaled, -FARTHEST, FARTHEST), nan=0.0))
    feed: dict[str, Any] = {"numeric": np.stack([*inputs, *indicators], axis=1).astype(np.float32)}
    (vocabulary,) = (column["vocabulary"] for column in statistics["categorical"])
    codes = {None: 0, **{city: 2 + number for number, city in enumerate(vocabulary)}}
    feed["categorical"] = np.array([[codes.get(city, 1)] for city in columns["city"].to_pylist()], np.int32)
    return session.run(None, feed)[0][:, 0]


def values(name: str) -> st.SearchStrategy[Any]:
    reals = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
    if name in ("far", "near"):
        return st.builds(float.__add__, st.sampled_from(OFFSETS), reals)
    if name == "count":
        return st.builds(int.__add__, st.sampled_from([0, 10**6, -(10**12)]), st.integers(-100, 100))
    if name == "when":
        days = st.datetimes(datetime(1960, 1, 1), datetime(2200, 1, 1))
        return st.one_of(st.sampled_from(SENTINELS), days.map(lambda moment: moment.replace(tzinfo=UTC)))
    return st.sampled_from([*CITIES, "Bonn", "São Paulo"])


@st.composite
def rows(draw: Any) -> Columns:
    """Columns with an empty beginning and gaps."""
    columns: Columns = {}
    for name, kind in KINDS.items():
        drawn = draw(st.lists(values(name), min_size=1, max_size=5))
        empty = draw(st.sampled_from([0, 0, 1, ROWS // 2, ROWS]))
        gaps = draw(st.sets(st.integers(0, ROWS - 1), max_size=4))
        cells = [None if row < empty or row in gaps else drawn[row % len(drawn)] for row in range(ROWS)]
        columns[name] = pa.array(cells, kind)
    return columns


def write(path: Path, format: str, columns: Columns) -> None:
    if format == "arrow":
        feather.write_feather(pa.table(columns), str(path), chunksize=7)
    else:
        WRITERS[format][1](path, columns)


@FUZZ
@given(
    columns=rows(),
    format=st.sampled_from(["csv", "json lines", "parquet", "parquet of texts", "arrow"]),
    index=st.booleans(),
)
def test_any_rows_in_any_format(model: Registry, columns: Columns, format: str, index: bool) -> None:
    given_columns = {INDEX: pa.array(np.arange(ROWS) * 1000), **columns} if index else columns
    given_columns = {**given_columns, "id": pa.array([f"row {number}" for number in range(ROWS)])}
    with tempfile.TemporaryDirectory() as directory:
        suffix = WRITERS[format][0] if format in WRITERS else "arrow"
        path = Path(directory, f"rows.{suffix}")
        write(path, format, given_columns)
        found = scored(model, path, Path(directory, "out"))
    expected = expected_values(Path(model.uri).parent / "package", columns)
    assert found["id"].to_pylist() == given_columns["id"].to_pylist()
    # Clipped outliers are up to 10,000 standard deviations away, where float32 has seven digits.
    allowed = 1e-3 + 1e-5 * np.abs(expected - MEAN)
    assert (np.abs(found["value"].to_numpy() - expected) <= allowed).all()


def test_the_index_is_no_input(model: Registry) -> None:
    statistics = json.loads((Path(model.uri).parent / "package/statistics.json").read_text())
    assert sorted(statistics["types"]) == sorted([*KINDS, "y"])
