"""The keys of a Hive-partitioned directory are columns."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from tests.support.proving import diagonal, first_few
from tests.support.shares import MADE_BY, on_several
from tests.support.tables import Prepare, with_types
from tests.support.wording import refuses

ROWS = 80


def part(seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    return pa.table({"x": draw.normal(size=ROWS), "y": draw.choice(["a", "b"], ROWS)})


def write(root: Path, folder: str, seed: int, suffix: str, table: pa.Table | None = None) -> Path:
    path = root / folder / f"part.{suffix}"
    path.parent.mkdir(parents=True)
    table = part(seed) if table is None else table
    if suffix == "parquet":
        pq.write_table(table, path, row_group_size=50)
    else:
        table.to_pandas().to_csv(path, index=False)
    return path


FOLDERS = [f"year={year}/day=2024-03-{day:02d}/kind={kind}" for year in (2023, 2024) for day in (1, 9) for kind in "ab"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_keys_are_columns_as_if_they_stood_in_the_files(prepared: Prepare, tmp_path: Path, suffix: str) -> None:
    whole = []
    for seed, folder in enumerate(FOLDERS):
        write(tmp_path / "in", folder, seed, suffix)
        keys = dict(pair.split("=") for pair in folder.split("/"))
        table = part(seed)
        for name, value in keys.items():
            table = table.append_column(name, pa.array([value] * ROWS))
        whole.append(table.to_pandas())
    data = prepared(tmp_path / "in")
    assert with_types(data) == {
        "x": ("number", "numeric"),
        "y": ("text", "target"),
        "year": ("integer", "numeric"),
        "day": ("time", "numeric"),
        "kind": ("text", "categorical"),
    }
    alone = prepared(pd.concat(whole).to_csv(index=False))
    assert with_types(alone) == with_types(data)
    for name in SPLITS:
        assert data.split(name).tobytes() == alone.split(name).tobytes()


def test_names_are_decoded_missing_is_missing_and_codes_are_text(prepared: Prepare, tmp_path: Path) -> None:
    for seed, folder in enumerate(("a%3Db=New%20York/zip=007", "a%3Db=__HIVE_DEFAULT_PARTITION__/zip=12", "zip=12")):
        write(tmp_path / "in", folder, seed, "parquet")
    data = prepared(tmp_path / "in")
    card = {column["name"]: column for column in data.card["columns"]}
    assert (card["a=b"]["missing"], card["a=b"]["type"]) == (2 * ROWS, "text")
    assert card["zip"]["type"] == "text" and sorted(text for text, _ in card["zip"]["top"]) == ["007", "12"]
    declared = prepared(tmp_path / "in", types={"zip": "number"})
    assert with_types(declared)["zip"] == ("number", "numeric")


@pytest.mark.parametrize("suffix", first_few(["csv", "parquet"]))
def test_a_key_that_is_a_column_too_has_to_agree(prepared: Prepare, tmp_path: Path, suffix: str) -> None:
    def with_year(*years: int) -> pa.Table:
        return part(0).append_column("year", pa.array(np.resize(years, ROWS)))

    write(tmp_path / "in", "year=2023", 0, suffix, with_year(2023))
    last = write(tmp_path / "in", "year=2024", 1, suffix, with_year(2024))
    assert with_types(prepared(tmp_path / "in"))["year"] == ("integer", "numeric")
    last.unlink()
    last.parent.rmdir()
    write(tmp_path / "in", "year=2024", 1, suffix, with_year(2024, 2023))
    with refuses(UserError, match=rf"year=2024/part\.{suffix}:"):
        prepared(tmp_path / "in")
    assert with_types(prepared(tmp_path / "in", drop=["year"]))["year"][1] == "dropped"


@pytest.mark.parametrize(("suffix", "settings"), diagonal(["csv", "parquet"], [{}, {"time": "day"}, {"group": "day"}]))
def test_several_shares_give_the_same_bytes(tmp_path: Path, suffix: str, settings: dict[str, Any]) -> None:
    for seed in range(9):
        write(tmp_path / "in", f"day=2024-01-{seed + 1:02d}", seed, suffix)
    config = DataConfig(**settings)
    alone = prepare(tmp_path / "alone", str(tmp_path / "in"), "y", config, MADE_BY)
    shared = on_several(tmp_path / "pods", str(tmp_path / "in"), 3, config)
    assert shared.fingerprint == alone.fingerprint
    if config.time:
        rows = {name: len(PreparedData.open(tmp_path / "alone").split(name)) for name in SPLITS}
        assert rows["test"] % ROWS == rows["validation"] % ROWS == 0 < rows["test"]
        cuts = alone.read_json("schema.json")["cuts"]
        assert cuts[1] in [datetime(2024, 1, day, tzinfo=UTC).timestamp() for day in range(1, 10)]


def test_new_partitions_beside_an_earlier_set(tmp_path: Path) -> None:
    write(tmp_path / "in", "day=2024-01-01", 0, "parquet")
    write(tmp_path / "in", "day=2024-01-02", 1, "parquet")
    prepare(tmp_path / "first", str(tmp_path / "in"), "y", DataConfig(), {})
    write(tmp_path / "in", "day=2024-01-03", 2, "parquet")
    prepare(tmp_path / "second", str(tmp_path / "in"), "y", DataConfig(earlier=str(tmp_path / "first")), {})
    assert PreparedData.open(tmp_path / "second").card["rows"]["read"] == 3 * ROWS
