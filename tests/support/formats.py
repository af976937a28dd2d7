"""The same table in every supported format, and the split of every row."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.source.config import DataConfig

#: The same table as the columns of Arrow that hold it.
Columns = dict[str, pa.Array]


def cells_of(column: pa.Array) -> list[str | None]:
    """As people and pandas write values in text."""

    def spelled(value: Any) -> str | None:
        return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    return [spelled(value) for value in column.to_pylist()]


def write_csv(path: Path, columns: Columns) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(["" if c is None else c for c in cells_of(a)] for a in columns.values()), strict=True))


def write_json(path: Path, columns: Columns) -> None:
    def value(cell: Any) -> Any:
        return cell if cell is None or isinstance(cell, bool | int | float | str) else str(cell)

    rows = pa.table(columns).to_pylist()
    path.write_text("".join(json.dumps({name: value(cell) for name, cell in row.items()}) + "\n" for row in rows))


def write_parquet(path: Path, columns: Columns) -> None:
    pq.write_table(pa.table(columns), path)


def write_texts(path: Path, columns: Columns) -> None:
    pq.write_table(pa.table({name: pa.array(cells_of(column)) for name, column in columns.items()}), path)


def write_arrow(path: Path, columns: Columns) -> None:
    feather.write_feather(pa.table({name: other_storage(column) for name, column in columns.items()}), str(path))


def other_storage(column: pa.Array) -> pa.Array:
    """The same values in an unusual type."""
    kind = column.type
    if pa.types.is_integer(kind):
        return column.cast(pa.decimal128(30, 2))
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("ns", "America/New_York"))
    return column.cast(pa.large_string()) if pa.types.is_string(kind) else column


WRITERS: dict[str, tuple[str, Callable[[Path, Columns], None]]] = {
    "csv": ("csv", write_csv),
    "json lines": ("jsonl", write_json),
    "parquet": ("parquet", write_parquet),
    "parquet of texts": ("parquet", write_texts),
    "arrow of other types": ("arrow", write_arrow),
}
FORMATS = [*WRITERS, "data frame"]


def prepare_as(format: str, directory: Path, columns: Columns, earlier: str = "", **settings: Any) -> PreparedData:
    """The table in one of ``FORMATS``, prepared."""
    directory.mkdir(parents=True)
    data: Any
    if format == "data frame":
        data = pa.table(columns).to_pandas(integer_object_nulls=True)
    else:
        suffix, write = WRITERS[format]
        data = str(directory / f"{directory.name}.{suffix}")
        write(Path(data), columns)
    config = DataConfig.from_dict({"earlier": earlier, "quarantine_limit": 1.0, **settings})
    prepare(directory / "prepared", data, "y", config, {}, workers=1)
    return PreparedData.open(directory / "prepared")


def marked(data: PreparedData, split: str, segment: int = 0) -> set[int]:
    """The values of the column "mark", without their halves, in a split's segment."""
    column = next(c for c in data.artifact.read_json("statistics.json")["numeric"] if c["name"] == "mark")
    rows = data.mapped(f"{split}-{segment:05d}.rows").reshape(-1).view(data.signature.record)
    return set(np.floor(rows["numeric"][:, 0].astype(float) * column["std"] + column["mean"]).astype(int).tolist())


def places(data: PreparedData, segment: int = 0) -> dict[int, str]:
    return {mark: split for split in SPLITS for mark in marked(data, split, segment)}


def rows_of_all_kinds(rows: int = 300) -> Columns:
    draw = np.random.default_rng(3)
    when = np.datetime64("2021-01-01T00:00:00", "us") + draw.integers(0, 10**12, rows)
    return {
        "mark": pa.array(np.arange(rows) + 0.5),
        "share": pa.array(draw.normal(size=rows)),
        "level": pa.array([None if n % 11 == 0 else -999 if n % 13 == 0 else n % 50 for n in range(rows)], pa.int64()),
        "flag": pa.array(draw.random(rows) < 0.5),
        "when": pa.array(when, pa.timestamp("us", "UTC")),
        "city": pa.array([None if n % 17 == 0 else ["Oslo", "São Paulo", "x y"][n % 3] for n in range(rows)]),
        "y": pa.array(np.arange(rows) % 2),
    }
