"""Types of columns are decided by all values, whatever their order, files and format."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.resolve import resolve_source
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns.number_formats import NumberFormat
from slipstream.shared.source.columns.readings import count_readings, total_readings
from slipstream.shared.source.columns.transform import Transform
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.text.text_tables import plan_text
from tests.support.proving import diagonal, first_few

ROWS = 1000
FORMATS = ("csv", "parquet", "jsonl", "arrow")
Frames = list[pd.DataFrame]


def write_frames(directory: Path, frames: Frames, suffix: str) -> Path:
    directory.mkdir(parents=True)
    for index, frame in enumerate(frames):
        path = directory / f"{index}.{suffix}"
        if suffix == "csv":
            frame.to_csv(path, index=False)
        elif suffix == "jsonl":
            frame.to_json(path, orient="records", lines=True, double_precision=15)
        elif suffix == "parquet":
            frame.to_parquet(path, index=False, row_group_size=300)
        else:
            frame.to_feather(path)
    return directory


def prepare_source(directory: Path, source: Path, config: DataConfig | None = None) -> PreparedData:
    return PreparedData.open(prepare(directory, str(source), "y", config or DataConfig(), {}, workers=1).directory)


def prepare_frames(tmp_path: Path, frames: Frames, suffix: str = "csv", name: str = "t", **config: Any) -> PreparedData:
    source = write_frames(tmp_path / name / "in", frames, suffix)
    settings = DataConfig.from_dict(config)
    return prepare_source(tmp_path / name / "out", source, settings)


def columns_of(data: PreparedData) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["type"], each["role"]) for each in data.artifact.read_json("schema.json")["columns"]}


def outcome(data: PreparedData) -> tuple[dict[str, tuple[str, str]], Any]:
    """What must not depend on the order of rows, files or formats: types with roles, and all else."""
    transform = Transform.from_json(data.artifact.read_json("statistics.json"))
    return columns_of(data), (data.card["rows"], transform.types, transform.categorical)


def warnings_of(data: PreparedData, column: str) -> list[str]:
    return [text for text in data.card["warnings"] if text.startswith(f"column {column!r}:")]


def target(rows: int = ROWS) -> np.ndarray:
    return np.where(np.random.default_rng(5).random(rows) < 0.5, "yes", "no").astype(object)


def frame(**columns: Any) -> pd.DataFrame:
    rows = len(next(iter(columns.values())))
    draw = np.random.default_rng(rows)
    return pd.DataFrame({"a": draw.normal(size=rows).round(6), **columns, "y": target(rows)})


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_column_that_is_empty_at_first_keeps_its_texts(tmp_path: Path, suffix: str) -> None:
    notes = np.full(ROWS, None, object)
    notes[:21] = [f"card {number % 3} stolen" for number in range(21)]
    empty = frame(note=np.full(ROWS, None, object), day=np.full(ROWS, None, object))
    days = np.full(ROWS, None, object)
    days[::50] = "2024-05-06"
    data = prepare_frames(tmp_path, [empty, frame(note=notes, day=days)], suffix)
    assert data.card["rows"]["quarantined"] == 0
    assert columns_of(data)["note"] == ("text", "categorical")
    assert columns_of(data)["day"] == ("time", "numeric")


@pytest.mark.parametrize(("suffix", "swapped"), diagonal(FORMATS, [False, True]))
def test_codes_are_texts_in_every_order_of_files(tmp_path: Path, suffix: str, swapped: bool) -> None:
    draw = np.random.default_rng(0)
    zips = draw.choice([f"{number:05d}" for number in range(10_000, 10_020)], ROWS).astype(object)
    led = zips.copy()
    led[:100] = "01000"
    frames = [frame(zip=zips), frame(zip=led)]
    data = prepare_frames(tmp_path, frames[::-1] if swapped else frames, suffix)
    assert columns_of(data)["zip"] == ("text", "categorical")
    assert "01000" in Transform.from_json(data.artifact.read_json("statistics.json")).categorical[0].vocabulary


def test_few_leading_zeros_are_numbers_with_a_warning(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 500, ROWS).astype(str).astype(object)
    counts[7] = "007"
    amounts = np.array([f"{number:.2f}" for number in draw.gamma(2, 50, ROWS)], object)
    amounts[9] = "00.00"
    days = np.array([f"2024-{m:02d}-01" for m in draw.integers(1, 13, ROWS)], object)
    days[:2] = "0000-00-00"
    data = prepare_frames(tmp_path, [frame(count=counts, amount=amounts, day=days)])
    kinds = columns_of(data)
    assert kinds["count"] == ("integer", "numeric") and kinds["amount"] == ("number", "numeric")
    assert kinds["day"] == ("time", "numeric") and data.card["rows"]["quarantined"] == 2
    (warning,) = warnings_of(data, "count")
    assert "1 of 1,000" in warning and "'007'" in warning and "data.types" in warning
    assert not warnings_of(data, "amount") and not warnings_of(data, "day")


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_days_first_are_recognised_stored_and_equal_pandas(tmp_path: Path, suffix: str) -> None:
    draw = np.random.default_rng(0)
    days = draw.integers(0, 3000, ROWS)
    times = pd.Timestamp("2016-01-01") + pd.to_timedelta(days, "D")
    texts = times.strftime("%d/%m/%Y").to_numpy(object)
    shown = frame(d=texts, us=times.strftime("%m-%d-%Y").to_numpy(object), big=[f"{t} UTC" for t in times])
    data = prepare_frames(tmp_path, [shown], suffix, shuffle=False)
    kinds = columns_of(data)
    assert (kinds["d"][0], kinds["us"][0], kinds["big"][0]) == ("day-first date", "month-first date", "time")
    transform = Transform.from_json(data.artifact.read_json("statistics.json"))
    means = {column.name: column.mean for column in transform.numeric if not column.part}
    seconds = pd.to_datetime(texts, dayfirst=True, format="%d/%m/%Y").to_numpy("datetime64[s]").astype(float)
    assert means["d"] == means["us"] == means["big"]
    assert means["d"] == pytest.approx(seconds.mean(), abs=40 * 86_400)
    records = np.zeros(ROWS, transform.signature.record)
    transform.encode(pa.RecordBatch.from_pandas(shown), records)
    first = next(column for column in transform.numeric if column.name == "d")
    np.testing.assert_allclose(
        records["numeric"][:, transform.numeric.index(first)], (seconds - first.mean) / first.std, rtol=1e-5
    )


def test_undecided_days_stay_text_unless_a_setting_decides(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    texts = np.array([f"{a}/{b}/2024" for a, b in draw.integers(1, 13, (ROWS, 2))], object)
    data = prepare_frames(tmp_path, [frame(d=texts)])
    assert columns_of(data)["d"][0] == "text"
    assert "data.dates" in warnings_of(data, "d")[0]
    assert (
        columns_of(prepare_frames(tmp_path, [frame(d=texts)], name="set", dates="day-first"))["d"][0]
        == "day-first date"
    )
    declared: dict[str, Any] = {"types": {"d": "date"}}
    both = prepare_frames(tmp_path, [frame(d=texts)], name="both", dates="month-first", **declared)
    assert columns_of(both)["d"][0] == "month-first date"
    one = prepare_frames(tmp_path, [frame(d=texts)], name="one", types={"d": "day-first date"})
    assert columns_of(one)["d"][0] == "day-first date"
    with pytest.raises(UserError, match=r"data\.types\.d: .*data\.dates"):
        prepare_frames(tmp_path, [frame(d=texts)], name="refused", **declared)


def test_no_clock_and_no_neighbour_changes_a_time(tmp_path: Path) -> None:
    days = np.array(["2024-03-04"] * ROWS, object)
    days[::2] = "2025-01-01"
    days[:4] = ["now", "today", "9999-12-31", "2024-03-04 00:00:00.123456789"]
    config: dict[str, Any] = {"quarantine_limit": 0.01, "shuffle": False}
    data = prepare_frames(tmp_path, [frame(d=days)], **config)
    assert columns_of(data)["d"] == ("time", "numeric") and data.card["rows"]["quarantined"] == 2
    # Another process on another day.
    code = (
        "import sys, datetime, time; real = time.time; time.time = lambda: real() + 1e7\n"
        "from slipstream.pipeline.prepare.engine import prepare\n"
        "from slipstream.shared.source.config import DataConfig\n"
        f"config = DataConfig.from_dict({config!r})\n"
        "print(prepare(__import__('pathlib').Path(sys.argv[2]), sys.argv[1], 'y', config, {}, workers=1).fingerprint)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t" / "in"), str(tmp_path / "later")]
    later = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    assert later == data.artifact.fingerprint


def test_sentinel_dates_beyond_nanoseconds_are_read_and_named(tmp_path: Path) -> None:
    moments = np.resize(np.array(["2020-01-01", "2021-06-01", "2022-03-01"], "datetime64[us]"), ROWS)
    moments[::10] = np.datetime64("9999-12-31")
    table = pa.table({"t": pa.array(moments), "a": pa.array(np.arange(ROWS) % 7), "y": pa.array(target())})
    source = tmp_path / "in"
    source.mkdir()
    pq.write_table(table, source / "t.parquet", use_deprecated_int96_timestamps=True)
    data = prepare_source(tmp_path / "out", source)
    column = next(each for each in data.card["columns"] if each["name"] == "t")
    assert column["max"] == np.datetime64("9999-12-31", "s").astype(float)
    (warning,) = warnings_of(data, "t")
    found = re.search(r"9999-12-31 \((.*?)%", warning)
    assert found and 8 < float(found[1]) < 12 and "data.missing" in warning
    frames = [pd.DataFrame({"t": pd.Series(moments).astype(str).to_numpy(), "a": np.arange(ROWS) % 7, "y": target()})]
    csv = prepare_frames(tmp_path, frames, missing=["", "9999-12-31"])
    settings = DataConfig.from_dict({"missing": ["", "9999-12-31"]})
    stored = prepare_source(tmp_path / "without", source, settings)
    for each in (csv, stored):
        figures = next(column for column in each.card["columns"] if column["name"] == "t")
        assert figures["missing"] == ROWS // 10 and figures["max"] < np.datetime64("2023-01-01", "s").astype(float)
        assert not warnings_of(each, "t")


@pytest.mark.parametrize("spelled", first_few([["1", "2", "3"], ["1.0", "2.0", "3.0"], [1, 2, 3], [1.0, 2.0, None]], 1))
def test_a_declared_category_is_spelled_alike_in_every_format(tmp_path: Path, spelled: list[object]) -> None:
    draw = np.random.default_rng(0)
    values = pd.Series([spelled[number] for number in draw.integers(0, 3, ROWS)])
    flags = pd.Series(draw.random(ROWS) < 0.5)
    found = set()
    for suffix in FORMATS:
        shown = frame(c=values.to_numpy(), f=(flags.map({True: "True", False: "FALSE"}) if suffix == "csv" else flags))
        data = prepare_frames(tmp_path, [shown], suffix, suffix, types={"c": "category", "f": "category"})
        transform = Transform.from_json(data.artifact.read_json("statistics.json"))
        found.add(tuple((c.name, frozenset(c.vocabulary), c.spelling) for c in transform.categorical))
    present = {"1", "2"} if spelled[2] is None else {"1", "2", "3"}
    assert found == {(("c", frozenset(present), "whole"), ("f", frozenset({"true", "false"}), "boolean"))}


@pytest.mark.parametrize("values", [[4006381333931, 5449000000996], [41.0, 41.5, 42.0], [0.1, 2e-7, 12345678901.25]])
def test_declared_numbers_are_the_same_categories_in_files_of_any_type(tmp_path: Path, values: list[float]) -> None:
    """As floats, in their own type and as texts; one file has no values."""
    column, gaps = pd.Series(np.resize(values, ROWS)), frame(c=np.full(ROWS, np.nan))
    shown = {"floats": column.astype(float), "own": column, "texts": column.map("{:.9f}".format)}
    found = set()
    written = [("floats", "csv"), ("floats", "parquet"), ("own", "arrow"), ("texts", "jsonl"), ("all", "parquet")]
    for name, suffix in written:
        frames = [frame(c=each.to_numpy()) for each in (shown.values() if name == "all" else [shown[name]])]
        data = prepare_frames(tmp_path, [*frames, gaps], suffix, f"{name}-{suffix}", types={"c": "category"})
        (c,) = Transform.from_json(data.artifact.read_json("statistics.json")).categorical
        found.add((frozenset(c.vocabulary), c.spelling))
    ((vocabulary, _),) = found
    assert vocabulary == {f"{Decimal(repr(value)):f}".removesuffix(".0") for value in values}


def test_composed_and_decomposed_texts_are_one_category(tmp_path: Path) -> None:
    names = np.resize(np.array(["caf\u00e9", "cafe\u0301", "tea"], object), ROWS)
    data = prepare_frames(tmp_path, [frame(c=names)])
    (category,) = Transform.from_json(data.artifact.read_json("statistics.json")).categorical
    assert set(category.vocabulary) == {"caf\u00e9", "tea"} and category.spelling == "text"


def messy(rows: int, seed: int) -> pd.DataFrame:
    """Return columns whose type a sample would guess wrongly, sorted so that rare values come last."""
    draw = np.random.default_rng(seed)
    late = np.arange(rows) >= rows - 40
    codes = np.where(late, "00123", draw.choice(["10001", "10002", "20003"], rows)).astype(object)
    mixed = np.where(late, "unknown", draw.integers(0, 9, rows).astype(str)).astype(object)
    flags = np.where(late, "", draw.choice(["true", "False"], rows)).astype(object)
    days = np.where(late, "25/12/2024", "01/02/2024").astype(object)
    few = draw.normal(size=rows).round(4).astype(str).astype(object)
    few[-2:] = "broken"
    return pd.DataFrame({"few": few, "codes": codes, "mixed": mixed, "flags": flags, "days": days, "y": target(rows)})


CASES: dict[str, Callable[[pd.DataFrame], Frames]] = {
    "reversed": lambda whole: [whole[::-1]],
    "shuffled": lambda whole: [whole.sample(frac=1, random_state=1)],
    "split": lambda whole: [whole[:100], whole[100:101], whole[101:]],
    "swapped": lambda whole: [whole[900:], whole[:900]],
    "with empty files": lambda whole: [whole[:0], whole[:500], whole[:0], whole[500:], whole[:0]],
}


@pytest.mark.parametrize(("case", "suffix"), diagonal(CASES, ["csv", "jsonl", "parquet"]))
def test_types_do_not_depend_on_order_files_or_format(tmp_path: Path, case: str, suffix: str) -> None:
    whole = messy(ROWS, 3)
    expected = outcome(prepare_frames(tmp_path, [whole], "csv", "whole"))
    kinds = {name: kind for name, (kind, _) in expected[0].items()}
    assert kinds == {
        "few": "number", "codes": "text", "mixed": "text", "flags": "boolean", "days": "day-first date", "y": "text",
    }  # fmt: skip
    frames = [part for part in CASES[case](whole) if suffix == "csv" or len(part)]
    assert outcome(prepare_frames(tmp_path, frames, suffix, "other")) == expected


def test_dropped_columns_are_neither_typed_nor_quarantined(tmp_path: Path) -> None:
    days = np.array(["25/12/2024"] * ROWS, object)
    numbers = np.array(["1"] * (ROWS - 3) + ["x"] * 3, object)
    data = prepare_frames(tmp_path, [frame(d=days, n=numbers)], drop=["d", "n"])
    assert data.card["rows"]["quarantined"] == 0 and columns_of(data)["d"][1] == "dropped"


def test_day_first_directories_are_dates(tmp_path: Path) -> None:
    for day in (1, 2, 30, 31):
        write_frames(tmp_path / "in" / f"day={day:02d}-12-2024", [frame(b=np.arange(ROWS) % 5)], "csv")
    data = prepare_source(tmp_path / "out", tmp_path / "in")
    assert columns_of(data)["day"] == ("day-first date", "numeric") and data.card["rows"]["quarantined"] == 0


def test_dictionaries_of_declared_dates_are_read(tmp_path: Path) -> None:
    texts = pd.Categorical(np.resize(["31/12/2024", "01/02/2024"], ROWS))
    data = prepare_frames(tmp_path, [frame(d=texts)], "parquet", types={"d": "date"})
    assert columns_of(data)["d"] == ("day-first date", "numeric") and data.card["rows"]["quarantined"] == 0


@pytest.mark.parametrize("lists", [[[1], [2]], [[], [1]]])
def test_a_key_with_lists_anywhere_is_no_column_of_values(tmp_path: Path, lists: list[list[int]]) -> None:
    values = [*["x"] * (ROWS - 2), *lists]
    data = prepare_frames(tmp_path, [frame(b=np.arange(ROWS) % 5, n=values)], "jsonl")
    assert columns_of(data)["n"][0] == "other" and data.card["rows"]["quarantined"] == 0


def test_large_integers_keep_their_digits_next_to_unreadable_values() -> None:
    texts = pa.array([str(2**53 + 1), "x"])
    values, failed = NumberFormat().convert(texts, "integer")
    assert values.to_pylist() == [2**53 + 1, None] and failed.tolist() == [False, True]


def test_the_header_after_a_byte_order_mark_is_no_value(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfa,y\n" + b"1,2\n" * 20)
    source = resolve_source(list_source(str(tmp_path / "t.csv")), "y", DataConfig(), "")
    assert plan_text(source).types == {"a": "integer", "y": "integer"}


def test_readings_add_up_to_those_of_the_whole() -> None:
    draw = np.random.default_rng(0)
    pool = ["1", "-2", "007", "3.5", "1e3", "nan", "true", "2024-01-31", "31/12/2024", "12/31/2024", "1/2/2024", "x",
            "0x1F", "", "99999999999999999999", "1234567890123456789", "now", "2024-02-30", "20240131"]  # fmt: skip
    texts = pa.array(draw.choice(pool, 500).tolist())
    marks = NumberFormat(missing=("",))
    whole = count_readings(texts, marks, "f", "c", np.arange(500))
    cut = [0, 3, 3, 120, 499, 500]
    parts = [count_readings(texts[low:high], marks, "f", "c", np.arange(low, high)) for low, high in pairwise(cut)]
    assert total_readings(parts) == whole
    classes = whole.numbers + whole.boolean + whole.times + whole.year_last
    unread = sum(text.as_py() in ("x", "0x1F", "now", "2024-02-30") for text in texts)
    assert classes + unread == whole.present
