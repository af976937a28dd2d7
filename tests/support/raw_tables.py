"""A prepared table with every type of column, and Arrow rows for a raw model."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.export.package.raw_times import input_dtype
from slipstream.pipeline.export.package.samples import iso_texts
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.transform import Transform
from slipstream.shared.source.columns.value_types import TEXT
from slipstream.shared.source.config import DataConfig

ARROW = {
    "number": pa.float64(),
    "integer": pa.int64(),
    "boolean": pa.bool_(),
    "time": pa.timestamp("us", tz="UTC"),
    "text": pa.string(),
}


def mixed_frame(rows: int, task: str, seed: int = 0) -> pd.DataFrame:
    """Numbers (one heavy-tailed, one with gaps), whole numbers, booleans, times and texts, and a target ``y``."""
    rng = np.random.default_rng(seed)
    age = rng.normal(40, 10, rows)
    income = np.exp(rng.normal(8, 3, rows)) * rng.choice([-1, 1], rows)
    start = np.datetime64("2021-03-01T00:00:00", "s").astype(np.int64)
    seconds = start + rng.integers(0, 700 * 86_400, rows)
    city = rng.choice(["Oslo", "Rome", "Lima", "São Paulo"], rows)
    score = (age - 40) / 10 + np.sign(income) + (city == "Oslo") + rng.normal(0, 0.3, rows)
    return pd.DataFrame(
        {
            "age": np.where(rng.random(rows) < 0.1, np.nan, age),
            "income": income,
            "visits": rng.integers(0, 50, rows),
            "member": rng.random(rows) < 0.5,
            "when": pd.to_datetime(seconds, unit="s", utc=True),
            "city": np.where(rng.random(rows) < 0.05, np.array(None), city),
            "plan": rng.choice(["free", "paid"], rows),
            "y": np.where(score > 0.5, "yes", "no") if task == "classification" else 100 + 10 * score,
        }
    )


def mixed_table(directory: Path, task: str, seed: int = 0, rows: int = 1500, **settings: Any) -> Path:
    """:func:`mixed_frame` prepared into ``directory``, which is returned."""
    prepare(directory, mixed_frame(rows, task, seed), "y", DataConfig(**settings), {})
    return directory


def as_raw(rows: pa.RecordBatch, columns: RawColumns, opset: int = 20) -> dict[str, np.ndarray]:
    """The columns of some rows as inputs of a raw model in ``opset``, by the names of the columns."""
    feed = {}
    for name, kind in columns.types.items():
        if kind == TEXT:
            texts = [columns.mark if text is None else text.strip() for text in rows.column(name).to_pylist()]
            feed[name] = np.array(texts, object)[:, None]
        else:
            feed[name] = value_types.as_numbers(rows.column(name))[:, None]
            if input_dtype(kind, opset) == "string":
                feed[name] = iso_texts(feed[name])
    return feed


def columns_of(transform: Transform) -> RawColumns:
    """Return the raw columns of a transform; ONNX must support all of them."""
    columns = read_columns(transform.to_json())
    assert isinstance(columns, RawColumns)
    return columns


def encoded(transform: Transform, rows: pa.RecordBatch) -> np.ndarray:
    """The records that a transform makes of rows."""
    out = np.zeros(rows.num_rows, transform.signature.record)
    transform.encode(rows, out)
    return out
