"""Text formats other than a comma-separated file: delimiters, JSON Lines, compression, and empty columns."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.text.csv_blocks import TextBlock
from slipstream.shared.source.text.json_lines import parse_json_block
from tests.support.limited import limited
from tests.support.tables import Prepare, table_text, with_types
from tests.support.wording import refuses

COMPRESSED = {"": None, ".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}


def detections(data: PreparedData) -> list[str]:
    return [warning for warning in data.card["warnings"] if "detected" in warning]


def same_rows(one: PreparedData, other: PreparedData) -> bool:
    return all(one.split(name).tobytes() == other.split(name).tobytes() for name in SPLITS)


def write(path: Path, text: str, compression: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.output_stream(path, compression=compression) as sink:
        sink.write(text.encode())
    return path


class TestDelimiters:
    @pytest.mark.parametrize("mark", [";", "|", "\t"])
    def test_another_one_is_detected_and_said(
        self, prepared: Prepare, capsys: pytest.CaptureFixture[str], mark: str
    ) -> None:
        plain = prepared(table_text(200))
        assert not capsys.readouterr().err and not detections(plain)
        data = prepared(table_text(200).replace(",", mark))
        assert same_rows(data, plain)
        assert f"prepare      delimiter {mark!r} detected in " in capsys.readouterr().err
        assert detections(data)[0].startswith(f"delimiter {mark!r} detected in ") and "t.csv" in detections(data)[0]

    def test_what_is_set_wins(self, prepared: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
        text = table_text(200).replace(",", ";")
        with refuses(UserError):
            prepared(text, delimiter=",")
        assert not detections(prepared(text, delimiter=";")) and not capsys.readouterr().err

    @pytest.mark.parametrize(
        "text",
        [
            "a;b|c;y\n" + "1;2|3;0\n" * 50,  # two marks would do
            "a;b;y\n" + "1;2;0\n3;1\n" * 50,  # not the same number in all lines
        ],
    )
    def test_a_doubtful_one_is_not(self, prepared: Prepare, text: str) -> None:
        with refuses(UserError):
            prepared(text)

    def test_a_comma_in_the_header_settles_it(self, prepared: Prepare) -> None:
        assert "a;b" in with_types(prepared("a;b,y\n" + "".join(f"{i % 9};2,{i % 2}\n" for i in range(300))))

    def test_one_in_quotes_does_not_count(self, prepared: Prepare) -> None:
        body = "".join(f'"{i % 5},0";{"pq"[i % 2]}\n' for i in range(200))
        assert with_types(prepared('"a,b";y\n' + body))["a,b"] == ("text", "categorical")

    @pytest.mark.parametrize("compression", COMPRESSED)
    def test_tsv_has_tabs(
        self, prepared: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str], compression: str
    ) -> None:
        text = table_text(200).replace(",", "\t").replace("Oslo", "Os,lo").replace("city", "city, town")
        data = prepared(write(tmp_path / f"t.tsv{compression}", text, COMPRESSED[compression]))
        assert data.card["rows"]["kept"] == 200 and "city, town" in with_types(data)
        assert not capsys.readouterr().err

    def test_files_that_do_not_agree_are_named(self, prepared: Prepare, tmp_path: Path) -> None:
        write(tmp_path / "in" / "1.csv", table_text(50))
        write(tmp_path / "in" / "2.csv", table_text(50).replace(",", ";"))
        with refuses(UserError, match=r"2\.csv:"):
            prepared(tmp_path / "in")


def json_lines(rows: int) -> list[dict[str, Any]]:
    return [
        {
            "number": i % 7 / 2,
            "many": 2**60 + 1000 * i,
            "city": ["Oslo", "Rome", None][i % 3],
            "flag": i % 5 == 0,
            "when": f"2024-03-{1 + i % 28:02d}",
            "deep": {"a": [i]},
            "tags": [1, 2],
            "y": "pq"[i % 2],
        }
        for i in range(rows)
    ]


def spelled(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


class TestJsonLines:
    @pytest.mark.parametrize("name", ["t.jsonl", "t.ndjson", *(f"t.jsonl{suffix}" for suffix in COMPRESSED if suffix)])
    def test_it_is_a_table_like_any_other(self, prepared: Prepare, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / name, spelled(json_lines(300)), COMPRESSED.get(Path(name).suffix))
        data = prepared(path)
        assert with_types(data) == {
            "number": ("number", "numeric"),
            "many": ("integer", "numeric"),
            "city": ("text", "categorical"),
            "flag": ("boolean", "numeric"),
            "when": ("time", "numeric"),
            "deep": ("other", "unsupported"),
            "tags": ("other", "unsupported"),
            "y": ("text", "target"),
        }
        assert sum("its type cannot be an input" in warning for warning in data.card["warnings"]) == 2

    def test_it_gives_the_rows_of_the_same_csv(self, prepared: Prepare, tmp_path: Path) -> None:
        rows = [{n: v for n, v in row.items() if n not in ("deep", "tags")} for row in json_lines(300)]
        cells = (("" if v is None else str(v) for v in row.values()) for row in rows)
        as_csv = prepared(",".join(rows[0]) + "\n" + "".join(",".join(line) + "\n" for line in cells))
        assert same_rows(prepared(write(tmp_path / "t.jsonl", spelled(rows))), as_csv)

    def test_bad_lines_are_set_aside(self, prepared: Prepare, tmp_path: Path) -> None:
        lines = spelled(json_lines(300)).splitlines()
        lines[10], lines[20], lines[30], lines[40] = '{"x": ', "[1]", r'{"city": "\ud800"}', ""
        lines[50] = "[" * 100_000
        data = prepared(write(tmp_path / "t.jsonl", "\n".join(lines)), quarantine_limit=0.1)
        result = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
        assert [(row["line"], row["reason"], row["raw"][:9]) for row in result] == [
            (11, "not JSON", '{"x": '),
            (21, "not a JSON object", "[1]"),
            (31, "half of a surrogate pair, which is not valid text", '{"city": '),
            (51, "not JSON", "[" * 9),
        ]
        assert data.card["rows"]["kept"] == 295

    @pytest.mark.prove
    def test_a_key_that_comes_late_or_in_one_file_is_a_column(self, prepared: Prepare, tmp_path: Path) -> None:
        rows = json_lines(20_000)
        rows[15_000]["late"] = rows[15_001]["late"] = "2024-01-01"
        write(tmp_path / "in" / "1.jsonl", spelled(rows))
        write(
            tmp_path / "in" / "2.jsonl",
            spelled([{**row, "other": "ab"[i % 2]} for i, row in enumerate(json_lines(300))]),
        )
        data = prepared(tmp_path / "in")
        card = {column["name"]: column for column in data.card["columns"]}
        assert (card["late"]["type"], card["late"]["missing"]) == ("time", 20_298)
        assert (card["other"]["type"], card["other"]["missing"]) == ("text", 20_000)

    @pytest.mark.parametrize("text", [json.dumps([{"a": 1}, {"a": 2}], indent=1), "1\n2\n", "\n\n", "{}\n{}\n"])
    def test_what_is_no_json_lines_is_said(self, prepared: Prepare, tmp_path: Path, text: str) -> None:
        with refuses(UserError, match=r"t\.jsonl:"):
            prepared(write(tmp_path / "t.jsonl", text))

    @pytest.mark.parametrize("keys", [12_000, 21_000])
    def test_ids_as_keys_are_refused(self, prepared: Prepare, tmp_path: Path, keys: int) -> None:
        """Their table would have as many columns as rows. The larger number is on one line."""
        ids = [{f"user_{number}": 1} for number in range(keys)]
        rows = ids if keys < 20_000 else [{name: 1 for each in ids for name in each}]
        path = write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, rows)))
        with limited(), refuses(UserError, match=r"t\.jsonl:"):
            prepared(path, target="user_0")

    def test_many_keys_are_read_in_little_time(self, tmp_path: Path) -> None:
        """4,000 columns of 4,000 rows, each with one value, and then one row with all."""
        rows = [{f"user_{number}": number} for number in range(4000)]
        rows.append({name: value for row in rows for name, value in row.items()})
        data = "\n".join(map(json.dumps, rows)).encode()
        with limited(seconds=3.0, more_bytes=256 << 20):
            parsed = parse_json_block(TextBlock("t.jsonl", 1, 0, len(data), data), ["first"], DataConfig())
        assert parsed.table.column_names == ["first", *(f"user_{number}" for number in range(4000))]
        assert parsed.table["first"].null_count == 4001
        for number in (0, 1234, 3999):
            column = parsed.table[f"user_{number}"]
            assert column.null_count == 3999 and column[number].as_py() == column[4000].as_py() == str(number)


class TestNothingThere:
    def test_a_column_without_a_value_is_set_aside(self, prepared: Prepare) -> None:
        text = table_text(200)
        header, *lines = text.splitlines()
        data = prepared(f"{header},gone,\n" + "".join(f"{line},?,\n" for line in lines))
        assert with_types(data)["gone"] == with_types(data)["unnamed_5"] == ("text", "empty")
        for name in ("gone", "unnamed_5"):
            assert f"column {name!r} is not used: it has no value in any row" in data.card["warnings"]
        assert data.card["rows"]["kept"] == 200

    @pytest.mark.parametrize("setting", ["id", "group"])
    def test_but_not_one_by_which_rows_are_split(self, prepared: Prepare, setting: str) -> None:
        text = table_text(200).replace("\n", ",\n").replace("y,\n", "y,gone\n", 1)
        with refuses(UserError, match=rf"data\.{setting}:"):
            prepared(text, **{setting: "gone"})

    @pytest.mark.parametrize(
        ("text", "settings"),
        [("y\n" + "0\n1\n" * 50, {}), ("id,x,y\n" + "1,2,0\n2,3,1\n" * 50, {"id": "id", "drop": ["x"]})],
    )
    def test_a_table_with_nothing_to_learn_from(self, prepared: Prepare, text: str, settings: dict[str, Any]) -> None:
        with refuses(UserError):
            prepared(text, **settings)

    def test_a_table_with_a_constant_besides_the_target(self, prepared: Prepare) -> None:
        with refuses(UserError):
            prepared("x,y\n" + "1,0\n1,1\n" * 50)


class TestNoFiles:
    def test_devices_pipes_and_sockets(self, prepared: Prepare, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (Path("/dev/null"), tmp_path / "pipe"):
            with refuses(UserError) as caught:
                prepared(path)
            assert "did you mean" not in caught.value.message

    def test_a_missing_path_never_suggests_itself(self, prepared: Prepare, tmp_path: Path) -> None:
        (tmp_path / "link.csv").symlink_to(tmp_path / "gone.csv")
        with refuses(UserError) as caught:
            prepared(tmp_path / "link.csv")
        assert "did you mean" not in caught.value.message
