"""One table gives one result: from every format, in any order of rows and files, on any number of pods."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.source.config import DataConfig
from tests.support.formats import Columns, write_csv, write_json
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.proving import first_few, pairwise
from tests.support.scoring import KEEP, scored
from tests.support.shares import on_several
from tests.support.tables import with_types

ROWS = 600
CONFIG = DataConfig(group="customer", quarantine_limit=0.2)
FORMATS = ("csv", "parquet", "jsonl", "arrow")


def columns(rows: int = ROWS) -> Columns:
    """Values that every format holds: no empty texts, no spaces around them, no marks for "missing"."""
    draw = np.random.default_rng(11)
    when = np.datetime64("2023-01-01T00:00:00", "us") + draw.integers(0, 10**13, rows)
    gaps = draw.random((3, rows)) < 0.1
    return {
        "customer": pa.array([f"c{number}" for number in draw.integers(0, 90, rows)]),
        "amount": pa.array(draw.normal(1e6, 300, rows), mask=gaps[0]),
        "count": pa.array(draw.integers(-5, 90, rows), mask=gaps[1]),
        "member": pa.array(draw.random(rows) < 0.4),
        "when": pa.array(when, pa.timestamp("us", "UTC")),
        "city": pa.array(draw.choice(["Oslo", "São Paulo", "x y"], rows), mask=gaps[2]),
        "id": pa.array([f"row {number}" for number in range(rows)]),
        "y": pa.array(draw.choice(["no", "yes"], rows)),
    }


def write(path: Path, values: Columns, group: int = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(values)
    if path.suffix == ".csv":
        write_csv(path, values)
    elif path.suffix == ".jsonl":
        write_json(path, values)
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=max(1, group))
    else:
        feather.write_feather(table, str(path), chunksize=max(1, group))
    return path


def result(data: PreparedData) -> dict[str, Any]:
    return {
        "rows": [data.split(split).tobytes() for split in SPLITS],
        "types": with_types(data),
        **{name: data.artifact.read_json(name) for name in ("statistics.json", "signature.json")},
        "warnings": data.card["warnings"],
        "columns": data.card["columns"],
    }


def test_every_format_gives_the_same_bytes_and_scores(tmp_path: Path) -> None:
    """Row groups of Parquet and batches of Arrow have fewer rows than the table."""
    results, prepared = {}, {}
    for format in FORMATS:
        path = write(tmp_path / f"{format}/t.{format}", columns(), group=97)
        prepare(tmp_path / f"{format}/prepared", str(path), "y", CONFIG, {}, workers=1)
        prepared[format] = PreparedData.open(tmp_path / f"{format}/prepared")
        results[format] = result(prepared[format])
    for format in FORMATS[1:]:
        for name, expected in results["csv"].items():
            assert results[format][name] == expected, (format, name)
    registry = Registry(str(tmp_path / "registry"))
    put(package(tmp_path / "package", prepared["csv"], steps=20), registry, prepared["csv"])
    scores = [
        scored(registry, tmp_path / f"{format}/t.{format}", tmp_path / f"{format}/out", KEEP) for format in FORMATS
    ]
    for table in scores:
        assert table.num_rows == ROWS
        assert all(table[name].equals(scores[0][name]) for name in table.column_names if name.startswith("prob"))


# What must change neither types nor roles nor the quarantined rows


def spoilt() -> Columns:
    """The table with five rows that are quarantined: two bad numbers among declared ones, three without a target."""
    values = {name: column.to_pylist() for name, column in columns().items()}
    values["level"] = [f"{number % 7}.5" for number in range(ROWS)]
    values["level"][17] = values["level"][411] = "lots"
    for row in (3, 200, 599):
        values["y"][row] = None
    kinds = {name: column.type for name, column in columns().items()}
    return {name: pa.array(cells, kinds.get(name, pa.string())) for name, cells in values.items()}


def taken(values: Columns, rows: list[int]) -> Columns:
    return {name: column.take(pa.array(rows, pa.int64())) for name, column in values.items()}


def meaning(data: PreparedData) -> Any:
    """Types, roles, and the quarantined values with their reasons, in any order."""
    bad = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
    return with_types(data), sorted((row["column"], row["reason"], row["raw"]) for row in bad), data.card["rows"]


#: Files of a table as lists of row numbers, in the order of their names.
ARRANGEMENTS: dict[str, list[list[int]]] = {
    "one file": [list(range(ROWS))],
    "permuted": [random.Random(0).sample(range(ROWS), ROWS)],
    "reversed": [list(range(ROWS))[::-1]],
    "two files": [list(range(400)), list(range(400, ROWS))],
    "two files, swapped": [list(range(400, ROWS)), list(range(400))],
    "permuted in seven files": [random.Random(1).sample(range(ROWS), ROWS)[start::7] for start in range(7)],
    "an empty file first": [[], list(range(ROWS))],
    "empty files between": [list(range(50)), [], list(range(50, ROWS)), []],
}
#: Every pair of an arrangement, a format and a number of pods.
CASES = list(pairwise(list(ARRANGEMENTS), FORMATS, (0, 3)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("plain")
    config = DataConfig.from_dict({"group": "customer", "quarantine_limit": 0.2, "types": {"level": "number"}})
    prepare(directory / "p", str(write(directory / "t.parquet", spoilt())), "y", config, {}, workers=1)
    types, bad, rows = meaning(PreparedData.open(directory / "p"))
    assert [reason for _, reason, _ in bad] == ["not number"] * 2 + ["the target is missing"] * 3
    return types, bad, rows


@pytest.mark.parametrize(("arrangement", "format", "pods"), first_few(CASES, 6))
def test_rows_files_formats_and_pods_do_not_matter(
    expected: Any, tmp_path: Path, arrangement: str, format: str, pods: int
) -> None:
    for number, rows in enumerate(ARRANGEMENTS[arrangement]):
        write(tmp_path / f"in/{number}.{format}", taken(spoilt(), rows), group=130)
    config = DataConfig.from_dict({"group": "customer", "quarantine_limit": 0.2, "types": {"level": "number"}})
    if pods:
        data = PreparedData.open(on_several(tmp_path / "pods", str(tmp_path / "in"), pods, config).directory)
    else:
        prepare(tmp_path / "p", str(tmp_path / "in"), "y", config, {}, workers=1)
        data = PreparedData.open(tmp_path / "p")
    assert meaning(data) == expected
