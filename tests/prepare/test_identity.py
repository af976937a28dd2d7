"""Equal values in any storage type or spelling are one value: equal rows share a split."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns.identity import MISSING, hash_rows, hash_values
from slipstream.shared.source.columns.number_formats import NumberFormat
from tests.support.formats import FORMATS, Columns, marked, places, prepare_as, rows_of_all_kinds
from tests.support.proving import first_few
from tests.support.tables import Prepare, vouch_for, with_types
from tests.support.wording import refuses

CUSTOMERS = 200
LARGE = 2**60
MARKS = ["", "NA", "-999"]


def large_ids(rows: int = CUSTOMERS) -> list[int]:
    """19 digits, next to each other: as floats hundreds of them are one."""
    return [LARGE + 3 * n for n in range(rows)]


def table(ids: pa.Array, mark: np.ndarray | None = None) -> Columns:
    rows = len(ids)
    marks = np.arange(rows) if mark is None else mark
    return {"mark": pa.array(marks + 0.5), "who": ids, "y": pa.array(marks % 2)}


# Ids and groups


@pytest.mark.parametrize("setting", ["id", "group"])
def test_large_ids_have_one_split_in_every_format(setting: str, tmp_path: Path) -> None:
    columns = table(pa.array(large_ids()))
    found = {format: places(prepare_as(format, tmp_path / format, columns, **{setting: "who"})) for format in FORMATS}
    assert len(found["csv"]) == CUSTOMERS and set(found["csv"].values()) == set(SPLITS)
    assert all(found[format] == found["csv"] for format in FORMATS), found


@pytest.mark.parametrize("bits", ["beyond 64", "unsigned"])
def test_ids_that_no_int64_holds(bits: str, tmp_path: Path) -> None:
    first = 10**25 if bits == "beyond 64" else 2**63
    digits = [str(first + n) for n in range(CUSTOMERS)]
    kind = pa.decimal128(30) if bits == "beyond 64" else pa.uint64()
    typed = pa.array([Decimal(d) if bits == "beyond 64" else int(d) for d in digits], kind)
    expected = places(prepare_as("csv", tmp_path / "csv", table(pa.array(digits)), group="who"))
    assert set(expected.values()) == set(SPLITS)
    for format in ("parquet", "parquet of texts", "json lines"):
        assert places(prepare_as(format, tmp_path / format, table(typed), group="who")) == expected, format


@pytest.mark.parametrize("format", FORMATS)
def test_no_customer_is_on_both_sides_of_new_files(format: str, tmp_path: Path) -> None:
    """What was prepared before as Parquet, and comes again in every format, by other rows of the same customers."""
    base = prepare_as("parquet", tmp_path / "base", table(pa.array(large_ids())), group="who")
    earlier = str(base.artifact.directory)
    both = prepare_as(format, tmp_path / "new", table(pa.array(large_ids())), earlier, group="who")
    assert places(both, 1) == places(both, 0) == places(base)


@pytest.mark.parametrize("unlike", [pa.float64(), pa.float32()])
def test_rounded_ids_are_refused(unlike: pa.DataType, prepared: Prepare, tmp_path: Path) -> None:
    """One file with whole numbers, the other with floats: which customer a float is cannot be known."""
    (tmp_path / "in").mkdir()
    ids = pa.array(large_ids())
    pq.write_table(pa.table(table(ids)), tmp_path / "in/a.parquet")
    pq.write_table(pa.table(table(ids.cast(unlike, safe=False))), tmp_path / "in/b.parquet")
    with refuses(UserError):
        prepared(tmp_path / "in", group="who")
    # As a number among others it may be rounded, and so may a smaller id.
    assert prepared(tmp_path / "in").card["rows"]["kept"] == 2 * CUSTOMERS
    pq.write_table(pa.table(table(pa.array(range(CUSTOMERS)))), tmp_path / "in/a.parquet")
    pq.write_table(pa.table(table(pa.array(range(CUSTOMERS)).cast(unlike))), tmp_path / "in/b.parquet")
    data = prepared(tmp_path / "in", group="who")
    sides = [marked(data, split) for split in SPLITS]
    assert sum(map(len, sides)) == len(set.union(*sides)) == CUSTOMERS


@pytest.mark.parametrize("text", ["1.152921504606847e+18", "9007199254740993.0", "1E16"])
def test_rounded_ids_in_text_are_refused(text: str, prepared: Prepare) -> None:
    lines = "".join(f"{i},{i},{i % 2}\n" for i in range(100))
    with refuses(UserError):
        prepared(f"mark,who,y\n{lines}7,{text},1\n", group="who")


SAME = {
    "whole and float": [
        pa.array([3]),
        pa.array([3.0]),
        pa.array(["3"]),
        pa.array(["3.0"]),
        pa.array([Decimal("3.00")]),
    ],
    "sizes": [
        pa.array([7], kind) for kind in (pa.int8(), pa.uint64(), pa.float32(), pa.float64(), pa.decimal256(50, 9))
    ],
    "large": [pa.array([LARGE + 1]), pa.array([LARGE + 1], pa.uint64()), pa.array([str(LARGE + 1)])],
    "negative": [pa.array([-LARGE - 1]), pa.array([Decimal(-LARGE - 1)]), pa.array([f"{-LARGE - 1}"])],
    "fraction": [pa.array([0.1]), pa.array([0.1], pa.float32()), pa.array(["0.1"]), pa.array([Decimal("0.10")])],
    "zero": [pa.array([0.0]), pa.array([-0.0]), pa.array([0]), pa.array(["-0"]), pa.array([Decimal("-0.0")])],
    "signs": [pa.array(["+5"]), pa.array([5]), pa.array(["5."]), pa.array([" 05 "])],
    "boolean": [pa.array([True]), pa.array(["true"]), pa.array(["Yes"]), pa.array([1])],
    "gaps": [
        pa.array([None], pa.string()),
        pa.array([np.nan]),
        pa.array(np.array([0x7FF8_0000_0000_1234], np.uint64).view(float)),
        pa.array(["nan"]),
        pa.array([None], pa.int64()),
    ],
    "day": [
        pa.array([date(2020, 1, 2)]),
        pa.array([date(2020, 1, 2)], pa.date64()),
        pa.array([datetime(2020, 1, 2)], pa.timestamp("s")),
        pa.array([datetime(2020, 1, 2, tzinfo=UTC)], pa.timestamp("ns", "Asia/Tokyo")),
        pa.array(["2020-01-02", "2020-01-02T01:00:00+01:00"])[1:],
        pa.array(["2020-01-02"]),
    ],
    "before 1970": [pa.array([datetime(1900, 1, 1)], pa.timestamp(u)) for u in ("s", "ms", "us", "ns")],
    "text": [
        pa.array(["é"]),
        pa.array(["e\u0301"]),
        pa.array([" é\t"]),
        pa.array(["é"], pa.large_string()),
        pa.array(["é"]).dictionary_encode(),
        pa.array(["é".encode()]),
    ],
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", SAME)
def test_one_value_has_one_hash(case: str, exact: bool) -> None:
    hashes = [int(hash_values(column, exact=exact)[0]) for column in SAME[case]]
    assert len(set(hashes)) == 1, hashes
    assert (hashes[0] == int(MISSING)) == (case == "gaps")


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.one_of(st.integers(-(2**70), 2**70), st.integers(2**53 - 2, 2**53 + 2), st.integers(-3, 3)))
def test_a_whole_number_has_one_hash_in_every_type(number: int) -> None:
    forms = [pa.array([str(number)]), pa.array([f"{number}."]), pa.array([Decimal(number)], pa.decimal128(38, 3))]
    kinds = [(pa.int64(), -(2**63), 2**63 - 1), (pa.uint64(), 0, 2**64 - 1), (pa.float64(), 1 - 2**53, 2**53 - 1)]
    forms += [pa.array([number], kind) for kind, low, high in kinds if low <= number <= high]
    hashes = {int(hash_values(form, exact=True)[0]) for form in forms}
    assert len(hashes) == 1
    assert hashes != {int(hash_values(pa.array([str(number + 1)]), exact=True)[0])}


def test_other_values_have_other_hashes() -> None:
    exact = [hash_values(pa.array(large_ids()), exact=True), hash_values(pa.array(["a", "b", "1a", "A"]), exact=True)]
    exact += [hash_values(pa.array([0.5, 1.5, 2.0, -1.0]), exact=True), hash_values(pa.array(["2020-01-02"]))]
    together = np.concatenate(exact)
    assert len(np.unique(together)) == len(together)
    # The marks for "missing" count in numbers and texts alike.
    marks = NumberFormat(missing=("-999", "?"))
    for column in (pa.array([-999, 1]), pa.array([-999.0, 1.0]), pa.array(["-999.0", "1"]), pa.array([" ?", "1"])):
        assert (hash_values(column, marks) == MISSING).tolist() == [True, False]
    assert len(np.unique(hash_rows([("a", pa.array([1, 2])), ("b", pa.array([2, 1]))], 2))) == 2


# Content


def test_without_any_mark_there_are_no_gaps_but_nulls(tmp_path: Path) -> None:
    data = prepare_as("parquet", tmp_path / "none", rows_of_all_kinds(), missing=[])
    assert next(column["min"] for column in data.card["columns"] if column["name"] == "level") == -999


def test_the_same_table_in_every_format_is_the_same_prepared_data(tmp_path: Path) -> None:
    columns, found = rows_of_all_kinds(), {}
    for format in FORMATS:
        data = prepare_as(format, tmp_path / format, columns, missing=MARKS)
        found[format] = {split: np.sort(data.split(split)).tobytes() for split in SPLITS}
        level = next(column for column in data.card["columns"] if column["name"] == "level")
        values = columns["level"].to_pylist()
        assert level["missing"] == values.count(None) + values.count(-999), format
        assert level["min"] == 0, format
    assert [format for format in FORMATS if found[format] != found["csv"]] == []


@pytest.mark.parametrize("format", first_few(FORMATS, 2))
def test_other_types_of_columns_move_no_row(format: str, tmp_path: Path) -> None:
    columns = rows_of_all_kinds()
    worked_out = places(prepare_as(format, tmp_path / "worked out", columns))
    types = {"level": "category", "flag": "text", "city": "category"}
    assert places(prepare_as(format, tmp_path / "declared", columns, types=types)) == worked_out


# Marks for "missing"


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.int16(), pa.float32(), pa.float64(), pa.decimal128(30, 2), pa.string()]
)
def test_marks_mean_missing_in_numbers_of_every_type(kind: pa.DataType, prepared: Prepare) -> None:
    values = [-999 if n % 5 == 0 else n % 40 for n in range(200)]
    level = pa.array([str(v) for v in values]) if kind == pa.string() else pa.array(values).cast(kind)
    data = prepared(pa.table({"level": level, "x": np.arange(200) % 7, "y": np.arange(200) % 3}), missing=MARKS)
    card = next(column for column in data.card["columns"] if column["name"] == "level")
    assert (card["missing"], card["min"]) == (40, 1.0)
    # The indicator of a gap is an input.
    assert data.signature.inputs[0].shape == (3,)


def test_marks_mean_missing_in_targets_times_and_as_other_spellings(prepared: Prepare) -> None:
    when = pa.array([date(1900, 1, 1) if n % 5 == 0 else date(2020, 1, 1 + n % 28) for n in range(200)])
    target = pa.array([-999 if n % 10 == 0 else n % 2 for n in range(200)])
    table = pa.table({"when": when, "x": np.arange(200) % 7, "y": target})
    data = prepared(table, missing=["-999", "1900-01-01", "9999"], quarantine_limit=0.2)
    assert data.card["rows"]["quarantined"] == 20 and data.signature.classes == ("0", "1")
    assert next(column["missing"] for column in data.card["columns"] if column["name"] == "when") == 20
    text = "level,x,y\n" + "".join(f"{'-999.0' if n % 5 == 0 else n % 40},{n % 7},{n % 3}\n" for n in range(200))
    level = next(c for c in prepared(text, missing=["-999"]).card["columns"] if c["name"] == "level")
    assert (level["missing"], level["min"]) == (40, 1.0)


@pytest.mark.parametrize("mark", ["9.96921e+36", "3.4028235e+38", "18446744073709551615", "1e90", "inf"])
def test_a_mark_may_be_too_large_for_the_column(mark: str, prepared: Prepare) -> None:
    number = [float(mark) if n % 5 == 0 else n % 40 for n in range(200)]
    table = pa.table({"level": pa.array(number), "x": np.arange(200) % 7, "y": np.arange(200) % 3})
    card = prepared(table, missing=[mark]).card["columns"]
    assert {column["name"]: column["missing"] for column in card} == {"level": 40, "x": 0, "y": 0}


def test_a_mark_is_the_number_that_it_spells() -> None:
    """Not its neighbour in floating point, and also in a decimal with places for few digits more."""
    marks = NumberFormat(missing=("9999999999999999", "-999", "0.5"))
    numbers = pa.array([10**16, 10**16 - 1, -999])
    assert marks.without_marks(numbers, "integer").to_pylist() == [10**16, None, None]
    prices = pa.array([Decimal("-999.00"), Decimal("0.50"), Decimal("0.51")], pa.decimal128(10, 2))
    assert marks.without_marks(prices, "number").to_pylist() == [None, None, Decimal("0.51")]


# Earlier versions


def test_what_was_prepared_by_other_rules_is_not_continued(prepared: Prepare, tmp_path: Path) -> None:
    data = prepared(pa.table(table(pa.array(large_ids()))), group="who")
    directory = data.artifact.directory
    schema = data.artifact.read_json("schema.json")
    del schema["row_hash"]
    vouch_for(directory, "schema.json", json.dumps(schema).encode())
    with refuses(UserError, match=r"data\.earlier:"):
        prepared(pa.table(table(pa.array(large_ids()))), group="who", earlier=str(directory))


def test_types_are_those_of_the_values_still(prepared: Prepare) -> None:
    frame = pd.DataFrame({"who": large_ids(), "x": np.arange(CUSTOMERS) % 7, "y": np.arange(CUSTOMERS) % 2})
    assert with_types(prepared(frame.to_csv(index=False), id="who"))["who"] == ("integer", "identifier")
