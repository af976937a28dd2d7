"""Bad data is reported in one line that names it; bad rows are quarantined and counted."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.source.files import list_source
from slipstream.shared.source.quarantine import read_quarantine
from slipstream.shared.source.resolved import fingerprint_source
from tests.support.proving import first_few
from tests.support.tables import Prepare, everything, table_text
from tests.support.wording import refuses

ROWS = "".join(f"{i % 7},{(i * 37) % 101},{'yes' if i % 3 else 'no'}\n" for i in range(120))
GOOD = "a,b,y\n" + ROWS

CASES: dict[str, tuple[str | bytes, dict[str, Any]]] = {
    "header only": ("a,b,y\n", {}),
    "header only, no line break": ("a,b,y", {}),
    "empty": ("", {}),
    "target absent": (GOOD, {"target": "yy"}),
    "no target": (GOOD, {"target": ""}),
    "target constant": (GOOD.replace("no", "yes"), {}),
    "class of one row": (GOOD + "1,2,maybe\n", {}),
    "target all missing": (re.sub(r"(yes|no)\n", "\n", GOOD), {}),
    "ragged": (GOOD + "1,2\n1,2,3,4\n" * 10, {}),
    "all ragged": ("a,b,y\n" + "1,2\n1,2,3,4\n" * 60, {}),
    "all infinite": ("a,b,y\n" + "1,inf,yes\n" * 60, {}),
    "infinite": (GOOD + "1,inf,yes\n" * 10, {}),
    "not UTF-8": ((GOOD + "1,2,n").encode() + b"\xe9\n", {}),
    "no such encoding": (GOOD, {"encoding": "utf-9"}),
    "no byte-order mark": (GOOD, {"encoding": "utf-16"}),
    "half of a pair": ("a,y\n\\ud800,1\n", {"encoding": "unicode_escape"}),
    **{
        f"no text encoding: {name}": (GOOD, {"encoding": name})
        for name in ("base64", "hex", "rot13", "zlib", "punycode", "undefined", "idna")
    },
    "wrong encoding": ("a,y\n" + "é,1\n" * 9, {"encoding": "ascii"}),
    "duplicate columns": (GOOD.replace("a,b", "a,a", 1), {}),
    "no names": (ROWS, {"header": False}),
    "too few names": (ROWS, {"header": False, "columns": ["a", "y"]}),
    "names twice": (GOOD, {"columns": ["a", "b", "y"]}),
    "drop absent": (GOOD, {"drop": ["c"]}),
    "id absent": (GOOD, {"id": "c"}),
    "target dropped": (GOOD, {"drop": ["y"]}),
    "many columns, none of use": (
        ",".join(f"c{i}" for i in range(300)) + ",y\n" + "".join("1," * 300 + f"{i % 2}\n" for i in range(120)),
        {},
    ),
    "many columns, another target": (
        ",".join(f"c{i}" for i in range(300)) + ",y\n" + "1," * 300 + "1\n",
        {"target": "nowhere to be found"},
    ),
    "no header after all": (ROWS, {}),
    "other delimiter": (GOOD.replace(",", ":"), {}),
    "too few rows": ("a,y\n1,p\n2,p\n3,q\n4,q\n", {}),
    "text for regression": (GOOD, {"task": "regression"}),
    "too many classes": ("a,y\n" + "".join(f"{i % 5},name{i}\n" for i in range(100)), {}),
    "only identifiers": ("a,y\n" + "".join(f"k{i},{i % 2}\n" for i in range(99)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_table_gets_one_line(case: str, prepared: Prepare) -> None:
    text, settings = CASES[case]
    with refuses(UserError) as caught:
        prepared(text, **settings)
    assert "\n" not in caught.value.message


def test_numbers_that_no_float32_holds_are_set_aside_and_outliers_are_cut_off(prepared: Prepare) -> None:
    data = prepared(table_text(600) + "1e300,Oslo,no\n-4e12,Oslo,no\n")
    row = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
    assert [(r["line"], r["column"], r["reason"]) for r in row] == [(602, "number", "too large for float32")]
    assert np.isfinite(everything(data)["numeric"]).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_left_behind_by_a_failure(prepared: Prepare, tmp_path: Path, workers: int) -> None:
    with pytest.raises(UserError, match="20 of 140"):
        prepared(GOOD + "1,2\n1,2,3,4\n" * 10, workers=workers)
    assert not list((tmp_path / "prepared-1").iterdir())


def test_bad_rows_are_set_aside_with_line_column_and_reason(prepared: Prepare) -> None:
    lines = table_text(600).splitlines()
    lines[100] = "1.5,Oslo"
    lines[200] = "many,Oslo,yes"
    lines[300] = "inf,Rome,no"
    lines[400] = "1.5,Rome,"
    lines.insert(50, "")
    data = prepared("\n".join(lines) + "\n\n")
    assert data.card["rows"] | {"train": 0, "validation": 0, "test": 0} == {
        "read": 600,
        "kept": 596,
        "quarantined": 4,
        "train": 0,
        "validation": 0,
        "test": 0,
    }
    assert len(everything(data)) == 596
    result = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
    assert sorted((row["line"], row["column"], row["reason"], row["raw"]) for row in result) == [
        (102, "", "2 fields, expected 3", "1.5,Oslo"),
        (202, "number", "not number", "many"),
        (302, "number", "infinite", "inf"),
        (402, "y", "the target is missing", ""),
    ]
    assert all(row["file"].endswith("t.csv") for row in result)


@pytest.mark.parametrize(("mark", "written"), [("None", "None"), ("NA", " NA "), ("", "")])
def test_a_rare_class_that_reads_as_missing_is_named(prepared: Prepare, mark: str, written: str) -> None:
    rows = "".join(f"{i % 13},{written if i % 150 == 7 else ('low', 'high')[i % 2]}\n" for i in range(1200))
    data = prepared("a,y\n" + rows)
    bad = list(read_quarantine(data.artifact))
    named = f"{mark!r} is in data.missing"
    assert {row.reason for row in bad} == {f"the target is missing: {named}" if mark else "the target is missing"}
    assert len(bad) == 8 and data.signature.classes == ("high", "low")
    warned = [warning for warning in data.card["warnings"] if warning.startswith("target 'y'")]
    assert len(warned) == bool(mark) and all(named in warning and "8 rows" in warning for warning in warned)


def test_lines_are_counted_through_quoted_line_breaks(prepared: Prepare) -> None:
    body = "".join(f'{i},"note\nof {i % 3}",{i % 2}\n' for i in range(200))
    data = prepared("x,note,y\n" + body + "oops,note,1\n")
    row = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
    assert [(r["line"], r["raw"]) for r in row] == [(402, "oops")]
    assert data.artifact.read_json("statistics.json")["categorical"][0]["vocabulary"][0].startswith("note\nof ")


def test_a_quote_that_never_closes_costs_one_row(prepared: Prepare) -> None:
    lines = table_text(300).splitlines()
    lines[150] = '1.0,"Oslo,yes'
    data = prepared("\n".join(lines) + "\n")
    assert data.card["rows"]["quarantined"] == 1 and data.card["rows"]["kept"] == 299
    row = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()[0]
    assert (row["line"], row["reason"]) == (151, "a quote opens here and never closes")


@pytest.mark.parametrize("rows", first_few([4_000, 400_000]))  # within and beyond what types are guessed from
def test_a_column_that_changes_its_type_half_way_is_text_with_a_word(prepared: Prepare, rows: int) -> None:
    body = "".join(f"{i % 50},{i % 9},{i % 2}\n" for i in range(rows))
    body += "".join(f"{'lmh'[i % 3]},{i % 9},{i % 2}\n" for i in range(rows // 4))
    data = prepared("x,z,y\n" + body)
    column = next(c for c in data.card["columns"] if c["name"] == "x")
    assert (column["type"], column["role"], column["distinct"]) == ("text", "categorical", 53)
    assert any("'x'" in warning and f"line {rows + 2})" in warning for warning in data.card["warnings"])
    assert data.card["rows"]["kept"] == rows + rows // 4


def test_a_byte_order_mark_is_no_part_of_a_name(prepared: Prepare) -> None:
    data = prepared(b"\xef\xbb\xbf" + table_text(200).encode(), drop=["number"], split={"seed": 1})
    assert [column["name"] for column in data.card["columns"]] == ["city", "y", "number"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "cp1252"])
def test_other_encodings_are_read(prepared: Prepare, encoding: str) -> None:
    text = "".join(f"{'Tromsø' if i % 3 else 'Ålesund'},{i % 5},{i % 2}\n" for i in range(200))
    data = prepared(("city,x,y\n" + text).encode(encoding), encoding=encoding)
    assert data.artifact.read_json("statistics.json")["categorical"][0]["vocabulary"] == ["Tromsø", "Ålesund"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_text_is_read_and_a_cut_one_is_named(prepared: Prepare, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.csv.{suffix}"
    with pa.output_stream(path, compression={"gz": "gzip", "zst": "zstd"}[suffix]) as sink:
        sink.write(table_text(5000).encode())
    assert prepared(path).card["rows"]["kept"] == 5000
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=rf"t\.csv\.{suffix}"):
        prepared(path)


@pytest.mark.prove
def test_very_many_columns_and_very_long_texts(prepared: Prepare) -> None:
    draw = np.random.default_rng(0)
    wide = pa.table({f"c{n}": draw.normal(size=60) for n in range(10_000)} | {"y": np.arange(60) % 2})
    assert prepared(wide).signature.inputs[0].shape == (10_000,)
    long = "x,note,y\n" + "".join(f"{i % 11},{'word ' * (200_000 if i == 7 else 50)},{i % 2}\n" for i in range(90))
    data = prepared(long)
    assert next(c["role"] for c in data.card["columns"] if c["name"] == "note") == "prose"
    assert data.card["rows"]["kept"] == 90


class TestFiles:
    def test_feather_is_read(self, prepared: Prepare, tmp_path: Path) -> None:
        draw = np.random.default_rng(0)
        table = pa.table({"x": draw.normal(size=700), "y": draw.integers(0, 2, 700)})
        feather.write_feather(table, tmp_path / "t.feather", chunksize=300)
        data = prepared(tmp_path / "t.feather")
        pq.write_table(table, tmp_path / "t.parquet")
        same = prepared(tmp_path / "t.parquet")
        np.testing.assert_allclose(data.split("test")["numeric"], same.split("test")["numeric"], rtol=1e-5)
        assert len(everything(data)) == 700

    def test_a_missing_file_names_a_close_one(self, prepared: Prepare, tmp_path: Path) -> None:
        (tmp_path / "people.csv").write_text(GOOD)
        with refuses(UserError):
            prepared(tmp_path / "poeple.csv")

    def test_an_empty_directory(self, prepared: Prepare, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "_SUCCESS").touch()
        with refuses(UserError):
            prepared(tmp_path / "d")

    def test_an_unknown_format(self, prepared: Prepare, tmp_path: Path) -> None:
        (tmp_path / "t.dat").write_bytes(b"a,b")
        with refuses(UserError):
            prepared(tmp_path / "t.dat")

    def test_a_truncated_parquet(self, prepared: Prepare, tmp_path: Path) -> None:
        path = tmp_path / "t.parquet"
        pq.write_table(pa.table({"x": np.arange(1000.0), "y": np.arange(1000) % 2}), path)
        path.write_bytes(path.read_bytes()[:-100])
        with refuses(UserError, match=r"t\.parquet:"):
            prepared(path)

    def test_a_parquet_damaged_inside(self, prepared: Prepare, tmp_path: Path) -> None:
        path = tmp_path / "t.parquet"
        draw = np.random.default_rng(0)
        table = pa.table({"x": draw.normal(size=5000), "y": draw.integers(0, 2, 5000)})
        pq.write_table(table, path, write_page_checksum=True)
        raw = bytearray(path.read_bytes())
        raw[3000] ^= 1
        path.write_bytes(raw)
        with refuses(UserError, match=r"t\.parquet:"):
            prepared(path)

    def test_text_called_parquet(self, prepared: Prepare, tmp_path: Path) -> None:
        (tmp_path / "t.parquet").write_text(GOOD)
        with refuses(UserError, match=r"t\.parquet:"):
            prepared(tmp_path / "t.parquet")

    def test_several_files_are_one_table(self, prepared: Prepare, tmp_path: Path) -> None:
        directory = tmp_path / "parts"
        directory.mkdir()
        (directory / "1.csv").write_text(GOOD)
        (directory / "2.csv").write_text("y,a,b\n" + "".join(f"yes,{i},{i}\n" for i in range(9)))
        assert prepared(directory).card["rows"]["kept"] == 129
        assert prepared(directory / "*.csv").card["rows"]["kept"] == 129

    def test_another_schema_in_one_file_is_named(self, prepared: Prepare, tmp_path: Path) -> None:
        directory = tmp_path / "parts"
        directory.mkdir()
        (directory / "1.csv").write_text(GOOD)
        (directory / "2.csv").write_text(GOOD.replace("b", "c", 1))
        with refuses(UserError, match=r"2\.csv:"):
            prepared(directory)

    def test_another_type_in_one_file_is_named(self, prepared: Prepare, tmp_path: Path) -> None:
        directory = tmp_path / "parts"
        directory.mkdir()
        pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0, 1]}), directory / "1.parquet")
        pq.write_table(pa.table({"x": ["a", "b"], "y": [0, 1]}), directory / "2.parquet")
        with refuses(UserError, match=r"2\.parquet:"):
            prepared(directory)

    def test_mixed_formats(self, prepared: Prepare, tmp_path: Path) -> None:
        directory = tmp_path / "parts"
        directory.mkdir()
        (directory / "1.csv").write_text(GOOD)
        pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0, 1]}), directory / "2.parquet")
        with refuses(UserError):
            prepared(directory)

    def test_the_fingerprint_follows_the_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text(GOOD)
        first = fingerprint_source(list_source(str(path)), "y")
        path.touch()
        assert fingerprint_source(list_source(str(path)), "y") == first
        path.write_text(GOOD.replace("yes", "YES", 1))
        assert fingerprint_source(list_source(str(path)), "y") != first
        assert fingerprint_source(list_source(""), "") == fingerprint_source(list_source(""), "") != first
