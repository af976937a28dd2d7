"""Unusual files, names and values: read correctly, or refused in one line with a remedy."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.errors import MOST_CHARACTERS, UserError
from slipstream.shared.logs import logger
from slipstream.shared.source.config import DataConfig, SplitConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.storage import s3
from tests.support.faulty_s3 import FaultyS3
from tests.support.tables import Prepare, table_text, with_types
from tests.support.wording import refuses, same_wording


class TestBrackets:
    """In names they are no wildcards, unless something has a name that they match."""

    def test_names_with_brackets(self, tmp_path: Path) -> None:
        folder = tmp_path / "run [1]"
        (folder / "a [x]").mkdir(parents=True)
        for name in ("t[1].csv", "t2.csv", "a [x]/t[1].csv"):
            (folder / name).write_text(table_text(20))
        for address, names in {
            "run [1]": ["a [x]/t[1].csv", "t2.csv", "t[1].csv"],
            "run [1]/t[1].csv": ["t[1].csv"],
            "run [1]/t*.csv": ["t2.csv", "t[1].csv"],
            "run [1]/*/t[1].csv": ["a [x]/t[1].csv"],
            "run [1]/**/t[1].csv": ["a [x]/t[1].csv", "t[1].csv"],
            "run [1]/a [x]": ["t[1].csv"],
        }.items():
            listing = list_source(f"{tmp_path}/{address}")
            assert [listing.relative(file) for file in listing.files] == names, address

    def test_brackets_that_match_are_a_wildcard(self, tmp_path: Path) -> None:
        for name in ("t1.csv", "t2.csv", "t3.csv"):
            (tmp_path / name).write_text("a,y\n")
        assert [file.name for file in list_source(f"{tmp_path}/t[12].csv").files] == ["t1.csv", "t2.csv"]
        with refuses(UserError):
            list_source(f"{tmp_path}/t[45].csv")

    def test_keys_with_brackets(self, store: FaultyS3) -> None:
        for key in ("run[1]/t[1].csv", "run[1]/a/t2.csv"):
            s3.client().put_object(Bucket="bucket", Key=key, Body=table_text(20).encode())
        for address, names in {
            "run[1]": ["a/t2.csv", "t[1].csv"],
            "run[1]/t[1].csv": ["t[1].csv"],
            "run[1]/*.csv": ["t[1].csv"],
        }.items():
            listing = list_source(f"s3://bucket/{address}")
            assert [listing.relative(file) for file in listing.files] == names, address


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.xlsx", b"PK\x03\x04", "is a spreadsheet; save the sheet as CSV, or read it with pandas.read_excel"),
        ("t.ods", b"PK\x03\x04", "is a spreadsheet; save the sheet as CSV"),
        ("t.xls", b"\xd0\xcf\x11\xe0", "is a spreadsheet; save the sheet as CSV"),
        ("t.zip", b"PK\x03\x04", "is an archive of files; unpack it, and give the directory"),
        ("t.csv.zip", b"PK\x03\x04", "is an archive of files; unpack it, and give the directory"),
        ("t.tar.gz", b"\x1f\x8b", "is an archive of files; unpack it, and give the directory"),
        ("t.sqlite", b"SQLite format 3\0", "is a database; write the table with pandas.read_sql"),
        ("t.pkl", b"\x80\x04", "is a pickle, which may run code when it is read; write its content with to_parquet"),
        ("t.json", b'[{"a": 1}]', "is JSON: if there is one object on each line, set data.format to json; if"),
        ("t.csv", b"PK\x03\x04", "is a spreadsheet or an archive; save the sheet as CSV, or unpack it"),
        ("t.csv", b"\xd0\xcf\x11\xe0", "is a spreadsheet; save the sheet as CSV"),
        ("t.csv", gzip.compress(table_text(50).encode()), "is compressed, but its name has no extension"),
        ("t.csv", table_text(50).encode("utf-16"), 'is UTF-16; set data.encoding to "utf-16"'),
        ("t.csv", table_text(50).encode("utf-16-le"), 'the header has bytes that are 0, .* "utf-16-le" or'),
        ("t.csv", bytes(1 << 20), "the header has bytes that are 0, which text does not have; if it .* expected a CSV"),
        ("t.csv", b"PAR1" + bytes(50), "is Parquet; rename it to .parquet, or set data.format to parquet"),
        ("t.parquet", b"ARROW1" + bytes(50), "is an Arrow file; rename it to .arrow, or set data.format to arrow"),
        ("t.feather", b"FEA1" + bytes(50), "is Feather of version 1; write it again with pyarrow"),
        ("t.arrow", b"\xff\xff\xff\xff" + bytes(50), "is an Arrow stream; write it as an Arrow file"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_to_do(
    name: str, content: bytes, message: str, prepared: Prepare, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: {message}") as refusal:
        prepared(tmp_path / name)
    assert len(refusal.value.message) < 500 and refusal.value.message.isprintable()


def test_one_among_others_is_named(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/1.csv").write_text(table_text(50))
    (tmp_path / "in/2.xlsx").write_bytes(b"PK\x03\x04")
    with refuses(UserError, match=r"in/2\.xlsx:"):
        prepared(tmp_path / "in")


@pytest.mark.parametrize("mark", ["\x1b[2J\x1b]0;owned\x07", "\u202e", "\x9b31m", "\0", "\x7f"])
def test_no_message_moves_the_cursor(
    mark: str, prepared: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"t{mark}.csv".replace("\0", "")
    path.write_text("a;y\n1;0\n" * 30 + "1;2;3\n" * 5 + f'1;"{mark}"\n')
    with pytest.raises(UserError) as refusal:
        prepared(path, quarantine_limit=0.01)
    assert refusal.value.message.isprintable() and "3 fields, expected 2" in refusal.value.message
    logger("prepare").warning("%s", path)
    written = capsys.readouterr().err
    assert "detected in" in written and all(line.isprintable() for line in written.splitlines())


def test_a_message_about_a_long_name_has_a_beginning_and_an_end(prepared: Prepare) -> None:
    text = "a,y\n" + "".join(f"{i % 7},{'pq'[i % 2]}\n" for i in range(60)) + f"1,{'z' * 100_000}\n"
    with refuses(UserError) as one:
        prepared(text)
    assert len(one.value.message) <= MOST_CHARACTERS + 3


def test_one_huge_cell_leaves_categories_what_they_are(prepared: Prepare) -> None:
    lines = [f"{i % 13},{'ABCD'[i % 4]},{i % 2}\n" for i in range(400)]
    lines[100] = f"1,{'x' * (10 << 20)},1\n"
    data = prepared("x,t,y\n" + "".join(lines))
    assert with_types(data)["t"] == ("text", "categorical") and data.card["rows"]["kept"] == 400
    assert set(data.artifact.read_json("statistics.json")["categorical"][0]["vocabulary"]) == set("ABCD")
    assert max(record.size for name, record in data.artifact.files.items() if name.endswith(".json")) < 100_000


@pytest.mark.parametrize("value", ["$1,{:03d}.50", "{} %", "€ {}", "{}€", "USD {}", "-${}", "({}.00)", "{},5 ‰", "£{}"])
def test_numbers_with_a_unit_are_text_with_a_word(value: str, prepared: Prepare) -> None:
    body = "".join(f'"{value.format(i)}",{i % 7},{i % 2}\n' for i in range(300))
    warnings = prepared("price,z,y\n" + body).card["warnings"]
    (word,) = [warning for warning in warnings if "column 'price': looks like numbers with a currency" in warning]
    assert value.format(0) in word
    same_wording(word)


def test_a_column_of_a_few_units_among_plain_numbers_is_said_and_codes_are_not(prepared: Prepare) -> None:
    body = "".join(f"{i}{' %' if i % 3 else ''},K{i},{i} kg,(a{i}),{i % 7},{i % 2}\n" for i in range(300))
    warnings = prepared("rate,code,kilo,note,z,y\n" + body + "1,2,3,4,5,0\n").card["warnings"]
    assert [warning.split("'")[1] for warning in warnings if "looks like numbers" in warning] == ["rate"]


@pytest.mark.parametrize("seed", [2**53, 2**64, 2**80, -1])
def test_a_seed_that_json_does_not_hold_exactly_is_refused_when_it_is_set(seed: int) -> None:
    for construct in (lambda: SplitConfig(seed=seed), lambda: DataConfig.from_dict({"split": {"seed": seed}})):
        with refuses(UserError):
            construct()


def test_the_largest_seed_splits(tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(300) % 50, "y": np.arange(300) % 2})
    prepare(tmp_path / "p", table, "y", DataConfig(split=SplitConfig(seed=2**53 - 1)), {})


@pytest.mark.parametrize("name", ["ORCID", "PAR1", "FEA1", "ARROW1", "BZhour"])
def test_a_name_of_a_column_is_no_mark_of_a_format(name: str, prepared: Prepare) -> None:
    body = "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(60))
    assert [column["name"] for column in prepared(f"{name},x,y\n{body}").card["columns"]] == [name, "x", "y"]


def test_one_long_line_of_no_ascii_says_that_it_does_not_end(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('"' + "é" * (5 << 20))
    with refuses(UserError):
        prepare(tmp_path / "p", str(tmp_path / "t.csv"), "y", DataConfig(), {})
