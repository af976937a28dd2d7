"""Columns get the types of their values in every format."""

import csv
import io
import re
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.config import DataConfig
from tests.support.tables import Prepare, with_types
from tests.support.wording import refuses

ROWS = 80
PHASES = (Phase.explicit, Phase.generate)
#: For each type: its values, how they are written, and the Arrow type that holds them.
KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], str], pa.DataType]] = {
    "integer": (st.integers(-(2**53), 2**53), str, pa.int64()),
    "few integers": (st.integers(0, 3), str, pa.int64()),
    "number": (st.floats(-1e9, 1e9).map(lambda x: round(x, 3) + 0.25), repr, pa.float64()),
    "boolean": (st.booleans(), lambda b: str(b).lower(), pa.bool_()),
    "date": (st.dates(date(1900, 1, 1), date(2100, 1, 1)), str, pa.date32()),
    "moment": (
        st.datetimes().map(lambda t: t.replace(year=2000 + t.year % 50)),
        lambda t: f"{t}Z",
        pa.timestamp("us", "UTC"),
    ),
    "text": (st.sampled_from(["red", "green", "blue", "x y"]), str, pa.string()),
    "yes or no": (st.sampled_from(["yes", "no"]), str, pa.string()),
    "code": (st.sampled_from(["007", "012", "1"]), str, pa.string()),
}


@st.composite
def tables(draw: Callable[[Any], Any]) -> tuple[pa.Table, pa.Table]:
    """The same table with its types and with texts."""
    typed, texts = {}, {}
    for index in range(draw(st.integers(1, 4))):
        values, spell, kind = KINDS[draw(st.sampled_from(sorted(KINDS)))]
        drawn = draw(st.lists(values, min_size=2, max_size=draw(st.sampled_from([4, ROWS]))))
        cells = [drawn[row % len(drawn)] for row in range(ROWS)]
        gaps = draw(st.sets(st.integers(0, ROWS - 1), max_size=5))
        cells = [None if row in gaps else cell for row, cell in enumerate(cells)]
        typed[f"c{index}"] = pa.array(cells, kind)
        texts[f"c{index}"] = pa.array([None if cell is None else spell(cell) for cell in cells])
    values, spell, kind = KINDS[draw(st.sampled_from(["few integers", "boolean", "text", "number"]))]
    labels = draw(st.lists(values, min_size=2, max_size=6, unique=True))
    cells = [labels[row % len(labels)] for row in range(ROWS)]
    typed["y"], texts["y"] = pa.array(cells, kind), pa.array([spell(cell) for cell in cells])
    return pa.table(typed), pa.table(texts)


def as_csv(texts: pa.Table) -> str:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(texts.column_names)
    writer.writerows([["" if cell is None else cell for cell in row.values()] for row in texts.to_pylist()])
    return sink.getvalue()


def outcome(directory: Path, path: Path) -> Any:
    """What was made of a table, or why nothing was."""
    output = directory / f"prepared-{path.name}"
    try:
        prepare(output, str(path), "y", DataConfig(), {})
    except UserError as error:
        return error.message.replace(path.name, "")
    data = PreparedData.open(output)
    return with_types(data), data.signature, [data.split(name).tobytes() for name in SPLITS], data.card["warnings"]


@settings(max_examples=10, derandomize=True, deadline=20_000, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(both=tables())
def test_csv_and_parquet_with_types_and_without(both: tuple[pa.Table, pa.Table]) -> None:
    typed, texts = both
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "t.csv").write_text(as_csv(texts))
        pq.write_table(typed, directory / "typed.parquet")
        pq.write_table(texts, directory / "texts.parquet")
        expected = outcome(directory, directory / "t.csv")
        assert outcome(directory, directory / "texts.parquet") == expected
        assert outcome(directory, directory / "typed.parquet") == expected


def test_a_dictionary_is_categories_whatever_its_texts(prepared: Prepare) -> None:
    years = pa.array([["2023", "2024"][i % 2] for i in range(100)])
    table = pa.table(
        {"year": years.dictionary_encode(), "same": years, "x": np.arange(100) % 7, "y": np.arange(100) % 3}
    )
    data = prepared(table)
    assert with_types(data)["year"] == ("text", "categorical")
    assert with_types(data)["same"] == ("integer", "numeric")


def test_a_few_bad_values_are_set_aside_and_many_make_it_text(prepared: Prepare) -> None:
    def table(bad: int) -> pa.Table:
        amounts = [f"{i % 9}.5" for i in range(20_000)]
        amounts[-bad:] = ["lots"] * bad  # behind what types are guessed from
        return pa.table({"amount": amounts, "x": np.arange(20_000) % 7, "y": np.arange(20_000) % 3})

    few = prepared(table(100))
    assert with_types(few)["amount"] == ("number", "numeric") and few.card["rows"]["quarantined"] == 100
    rows = pq.read_table(few.artifact.path("quarantine.parquet")).to_pylist()
    assert (rows[0]["line"], rows[0]["reason"], rows[0]["raw"]) == (19_901, "not number", "lots")
    many = prepared(table(1000))
    assert with_types(many)["amount"] == ("text", "categorical") and many.card["rows"]["quarantined"] == 0
    assert any("1,000 of 20,000 values are not" in word and "line 19001" in word for word in many.card["warnings"])


def test_a_column_of_nulls_in_one_file_has_the_type_of_the_others(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    common = {"x": np.arange(90) % 7, "y": np.arange(90) % 2}
    for number, column in enumerate((pa.nulls(90), pa.array(["a", "b", "c"] * 30), pa.nulls(90))):
        pq.write_table(pa.table({"t": column, **common}), tmp_path / "in" / f"{number}.parquet")
    data = prepared(tmp_path / "in")
    assert with_types(data)["t"] == ("text", "categorical")
    assert next(column["missing"] for column in data.card["columns"] if column["name"] == "t") == 180


def test_texts_that_are_not_utf8_are_named(prepared: Prepare) -> None:
    raw = pa.array([b"caf\xe9", b"tea"] * 50).view(pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 100, raw.buffers())
    table = pa.table({"drink": texts, "x": np.arange(100) % 7, "y": np.arange(100) % 3})
    with refuses(UserError, match=r"t\.parquet:"):
        prepared(table)
    assert prepared(table, drop=["drink"]).card["rows"]["kept"] == 100


def test_a_decimal_target_has_the_classes_of_its_csv(prepared: Prepare) -> None:
    table = pa.table({"x": np.arange(99) % 7, "y": pa.array(np.arange(99) % 3).cast(pa.decimal128(21, 2))})
    data = prepared(table)
    assert data.signature.classes == ("0", "1", "2")
    counts = data.card["classes"]
    assert sum(sum(split.values()) for split in counts.values()) == 99


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_times_that_microseconds_cannot_hold(prepared: Prepare, tmp_path: Path, unit: str) -> None:
    far = pa.array([2**62 + i for i in range(100)], pa.int64()).view(pa.timestamp(unit))
    table = pa.table({"t": far, "x": np.arange(100) % 7, "y": np.arange(100) % 3})
    feather.write_feather(table, tmp_path / "t.feather")
    data = prepared(tmp_path / "t.feather")
    result = next(column for column in data.card["columns"] if column["name"] == "t")
    assert result["min"] == pytest.approx(2**62 / {"s": 1, "ms": 1000}[unit])


#: Of what times are made, as people write them and otherwise.
TIMES = ["2020-01-02T03:04:05Z", "20200102", "now", "+2020-1-2", "-20-01-01", "12:30", "1/2/2020", "Jan 2020", "v 3"]


@pytest.mark.prove
@given(st.sampled_from(TIMES), st.lists(st.tuples(st.integers(0, 20), st.sampled_from("0129-+:/TZ. W")), max_size=3))
@settings(max_examples=300, deadline=None, phases=PHASES)
def test_times_are_those_that_pandas_reads_without_a_clock(text: str, changes: list[tuple[int, str]]) -> None:
    for index, mark in changes:
        text = text[:index] + mark + text[index + index % 2 :]
    expected = pd.to_datetime(pd.Series([text.strip()]), format="ISO8601", utc=True, errors="coerce")[0]
    result = value_types.one_by_one(pa.array([text.strip()]), value_types.TIME)[0].as_py()
    if not re.search(r"now|today|^-|^\d{4}[/.]", text.strip()):
        assert result is not None or pd.isna(expected)
    if result is not None and not pd.isna(expected):
        assert result == expected.floor("us").to_pydatetime()
