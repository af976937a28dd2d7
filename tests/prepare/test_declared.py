"""Declared properties of the data (types, separators, quotes) are applied; undeclared ones cause a warning."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns.transform import Transform
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.text.csv_blocks import parse_csv_block, read_blocks
from tests.support.tables import Prepare, everything
from tests.support.wording import refuses


def column(data: PreparedData, name: str) -> dict[str, Any]:
    return next(column for column in data.card["columns"] if column["name"] == name)


def quarantined(data: PreparedData) -> list[tuple[int, str, str, str]]:
    rows = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
    return [(row["line"], row["column"], row["reason"], row["raw"]) for row in rows]


class TestTypes:
    def test_what_is_declared_wins_over_what_the_values_look_like(self, prepared: Prepare) -> None:
        lines = [f"{i % 9},{i % 5},{i},{'yn'[i % 2]},{20200101 + i % 9},{i % 2}" for i in range(300)]
        text = "zip,amount,code,flag,day,y\n" + "\n".join(lines) + "\n"
        declared = {"zip": "text", "code": "category", "flag": "boolean", "day": "category"}
        data = prepared(text, types=declared)
        result = {name: (column(data, name)["type"], column(data, name)["role"]) for name in ("zip", "code", "flag")}
        assert result == {
            "zip": ("text", "categorical"),
            "code": ("text", "categorical"),
            "flag": ("boolean", "numeric"),
        }
        assert column(data, "day")["distinct"] == 9

    @pytest.mark.parametrize("declared", ["date", "category"])
    def test_times_may_count_nanoseconds(self, declared: str, prepared: Prepare) -> None:
        lines = [f"2024-03-{1 + i % 28:02d}T10:00:00.{i % 7:09d}Z,{i % 2}" for i in range(300)]
        data = prepared("when,y\n" + "\n".join(lines) + "\n", types={"when": declared})
        assert data.card["rows"]["kept"] == 300

    def test_columnar_columns_are_read_as_declared(self, prepared: Prepare) -> None:
        draw = np.random.default_rng(0)
        amounts = [f"{n:.2f}" for n in draw.normal(size=400)]
        amounts[7] = "lots"
        table = pa.table(
            {
                "zip": draw.integers(1000, 1020, 400),
                "amount": amounts,
                "when": [f"2024-03-{1 + i % 28:02d}T10:00:00+02:00" for i in range(400)],
                "flag": draw.integers(0, 2, 400),
                "y": draw.integers(0, 2, 400),
            }
        )
        declared = {"zip": "text", "amount": "number", "when": "date", "flag": "boolean"}
        data = prepared(table, types=declared)
        result = {name: column(data, name)["type"] for name in declared}
        assert result == {"zip": "text", "amount": "number", "when": "time", "flag": "boolean"}
        assert quarantined(data) == [(8, "amount", "not number", "lots")]
        assert column(data, "when")["min"] == datetime(2024, 3, 1, 8, tzinfo=UTC).timestamp()

    def test_a_declared_type_settles_what_files_disagree_on(self, prepared: Prepare, tmp_path: Path) -> None:
        (tmp_path / "parts").mkdir()
        common = {"x": np.arange(100) % 7, "y": np.arange(100) % 2}
        pq.write_table(pa.table({"zip": np.arange(100) % 9, **common}), tmp_path / "parts" / "1.parquet")
        pq.write_table(pa.table({"zip": [str(i % 9) for i in range(100)], **common}), tmp_path / "parts" / "2.parquet")
        with refuses(UserError, match=r"2\.parquet:"):
            prepared(tmp_path / "parts")
        assert column(prepared(tmp_path / "parts", types={"zip": "text"}), "zip")["distinct"] == 9

    def test_values_that_are_not_as_declared_are_counted_and_never_change_the_type(self, prepared: Prepare) -> None:
        lines = [f"{'?' if i % 11 == 0 else 'abc'[i % 3] if i % 3 == 0 else i},{i % 5},{i % 2}" for i in range(200)]
        text = "amount,x,y\n" + "\n".join(lines) + "\n"
        with refuses(UserError):
            prepared(text, types={"amount": "number"})
        assert prepared(text, types={"amount": "number"}, quarantine_limit=0.4).card["rows"]["quarantined"] == 60

    def test_a_numeric_target_can_be_declared_to_be_classes(self, prepared: Prepare) -> None:
        text = "x,y\n" + "".join(f"{i % 7},{i % 30}\n" for i in range(600))
        assert prepared(text).signature.task == "regression"
        data = prepared(text, types={"y": "category"})
        assert len(data.signature.classes) == 30

    @pytest.mark.parametrize(
        "types", [{"zap": "text"}, {"zip": "string"}, {"zip": 3}, {"tags": "number"}, {"zip": "date"}]
    )
    def test_what_cannot_be_is_refused(self, prepared: Prepare, types: dict[str, Any]) -> None:
        table = pa.table({"zip": np.arange(60), "tags": [[1]] * 60, "y": np.arange(60) % 2})
        with refuses(UserError):
            prepared(table, types=types)


class TestNumbers:
    SPELLINGS = {
        "German": ("1.234,5", ";", {"decimal": ",", "thousands": "."}),
        "French": ("1\u202f234,5", ";", {"decimal": ",", "thousands": " "}),
        "English": ('"1,234.5"', ",", {"thousands": ","}),
        "Swiss": ("1'234.5", ",", {"thousands": "'"}),
    }

    @pytest.mark.parametrize("land", SPELLINGS)
    def test_separated_numbers_are_read_as_declared(self, prepared: Prepare, land: str) -> None:
        spelled, delimiter, settings = self.SPELLINGS[land]
        lines = [delimiter.join([spelled.replace("5", str(i % 9)), str(i % 7), str(i % 2)]) for i in range(300)]
        text = delimiter.join("xzy") + "\n" + "\n".join(lines) + "\n"
        data = prepared(text, delimiter=delimiter, **settings)
        result = column(data, "x")
        assert (result["type"], result["min"], round(result["max"], 6)) == ("number", 1234.0, 1234.8)
        assert not any("separators" in warning for warning in data.card["warnings"])

    def test_undeclared_ones_are_text_and_the_warning_names_the_settings(self, prepared: Prepare) -> None:
        text = "x;z;y\n" + "".join(f"1.23{i % 9},5;{i % 7};{i % 2}\n" for i in range(300))
        data = prepared(text, delimiter=";")
        expected = 'set data.decimal to "," and data.thousands to ".", else declare it in data.types as text'
        assert column(data, "x")["type"] == "text"
        assert any("'x'" in warning and expected in warning for warning in data.card["warnings"])

    def test_a_point_is_no_decimal_mark_when_the_comma_is(self, prepared: Prepare) -> None:
        text = "x;z;y\n" + "".join(f"3,{i % 9};{i % 7};{i % 2}\n" for i in range(300)) + "3.14;1;1\n"
        data = prepared(text, delimiter=";", decimal=",")
        assert quarantined(data) == [(302, "x", "not number", "3.14")]

    def test_scoring_reads_numbers_as_training_did(self, prepared: Prepare) -> None:
        text = "x;z;y\n" + "".join(f"1.00{i % 9},5;{i % 7};{i % 2}\n" for i in range(300))
        data = prepared(text, delimiter=";", decimal=",", thousands=".")
        transform = Transform.from_json(json.loads(json.dumps(data.artifact.read_json("statistics.json"))))
        rows = np.zeros(2, data.signature.record)
        transform.encode(pa.RecordBatch.from_pydict({"x": ["1.004,5", "1004,5"], "z": ["3", "3"]}), rows)
        assert (rows["numeric"][0] == rows["numeric"][1]).all() and abs(rows["numeric"][0, 0]) < 1


class TestMarks:
    def test_another_quote(self, prepared: Prepare) -> None:
        lines = [f"'Oslo, {i % 3} ''old''','a\nb',{i % 5},{i % 2}" for i in range(200)]
        data = prepared("city,note,x,y\n" + "\n".join(lines) + "\n", quote="'")
        assert column(data, "city")["top"][0][0].endswith("'old'") and column(data, "note")["role"] == "constant"

    def test_escaped_quotes_line_breaks_and_delimiters(self, prepared: Prepare) -> None:
        lines = [rf'"5\" disk","two\\",a\,b {i % 3},{i % 5},{i % 2}' for i in range(300)]
        data = prepared("disk,size,both,x,y\n" + "\n".join(lines) + "\n", escape="\\")
        assert column(data, "both")["top"][0][0].startswith("a,b ")
        assert column(data, "disk")["top"] == [['5" disk', column(data, "disk")["top"][0][1]]]
        assert data.card["rows"]["kept"] == 300

    def test_no_quotes_at_all(self, prepared: Prepare) -> None:
        lines = [f"{'3 inch' if i % 2 else '5' + chr(34)},{i % 5},{i % 2}" for i in range(200)]
        data = prepared("size,x,y\n" + "\n".join(lines) + "\n", quote="")
        assert data.card["rows"]["kept"] == 200 and column(data, "size")["distinct"] == 2

    @pytest.mark.parametrize("block", [7, 64, 1000])
    def test_blocks_end_where_records_end_whatever_the_marks(self, tmp_path: Path, block: int) -> None:
        path = tmp_path / "t.csv"
        path.write_text("".join(f"'a\\'\n{i}\\\\','b''\n{i}',{i}\n" for i in range(50)))
        config = DataConfig(quote="'", escape="\\", header=False, columns=["a", "b", "c"])
        file = list_source(str(path)).files[0]
        parts = [parse_csv_block(part, config.columns, config, False) for part in read_blocks(file, config, block)]
        assert sum(part.table.num_rows for part in parts) == 50 and not any(part.bad for part in parts)
        assert [value for part in parts for value in part.table["c"].to_pylist()] == [str(i) for i in range(50)]

    @pytest.mark.parametrize(
        "settings",
        [
            {"quote": "''"},
            {"delimiter": ";;"},
            {"quote": ","},
            {"escape": '"'},
            {"decimal": ",", "thousands": ","},
            {"decimal": ";"},
        ],
    )
    def test_impossible_marks_are_refused(self, settings: dict[str, Any]) -> None:
        with refuses(UserError):
            DataConfig.from_dict(settings)


def test_times_of_different_zones_are_one_moment(prepared: Prepare) -> None:
    zones = ["2024-06-01T12:00:00Z", "2024-06-01T14:00:00+02:00", "2024-06-01 07:00:00-05:00", "2024-06-01T12:00:00"]
    text = "t,x,y\n" + "".join(f"{zones[i % 4]},{i % 7},{i % 2}\n" for i in range(200))
    result = column(prepared(text), "t")
    assert (result["type"], result["role"]) == ("time", "constant")
    assert result["min"] == result["max"] == datetime(2024, 6, 1, 12, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_parquet_times_of_any_unit_and_zone_are_one_moment(prepared: Prepare, unit: str) -> None:
    moment = np.full(200, int(datetime(2024, 6, 1, 12, tzinfo=UTC).timestamp()))
    factor = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = pa.array(moment * factor).cast(pa.timestamp(unit, tz="Europe/Oslo"))
    data = prepared(pa.table({"t": times, "x": np.arange(200) % 7, "y": np.arange(200) % 2}))
    assert column(data, "t")["min"] == float(moment[0])
    assert len(everything(data)) == 200
