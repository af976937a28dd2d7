"""A CSV file cut into chunks has the same rows as with Python's csv module, wherever the borders fall."""

import csv
import gzip
import io
import random
from itertools import product
from pathlib import Path

import pytest

from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.text import csv_blocks, record_ends, text_tables
from slipstream.shared.source.text.csv_blocks import NEVER_CLOSES, read_blocks
from tests.support.csv_text import PLAIN, QUOTED, blocks_against_csv, by_blocks, by_csv, drawn
from tests.support.proving import diagonal
from tests.support.tables import Prepare


@pytest.mark.parametrize(("end", "escape"), diagonal(["\n", "\r\n", "\r"], ["", "\\"]))
def test_blocks_hold_the_rows_of_the_csv_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, escape: str
) -> None:
    draw, borders = random.Random(0), 0
    for look, encoding in product((5, 64 << 10), ("utf-8", "utf-8-sig")):
        monkeypatch.setattr(record_ends, "LOOK_BYTES", look)
        borders += blocks_against_csv(draw, tmp_path / "t.csv", DataConfig(escape=escape, encoding=encoding), end)
    assert borders > 150


def test_a_record_that_does_not_end_costs_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few bytes are read at once, a row that is kept is what the csv module finds from its line on."""
    monkeypatch.setattr(csv_blocks, "RECORD_BYTES", 400)
    draw, faults = random.Random(1), 0
    for _ in range(20):
        open_at, size = draw.randrange(40), draw.randrange(16, 200)
        before, after = drawn(draw, PLAIN + QUOTED, "\n", open_at), drawn(draw, PLAIN[:5], "\n", 150).replace('"', "")
        text = before + '1,"never closed,2\n' + after + drawn(draw, PLAIN + QUOTED, "\n")
        assert len(after) > 2 * (400 + size)
        config = DataConfig(encoding=("utf-8", "utf-8-sig")[size % 2])
        rows, bad, where = by_blocks(tmp_path / "t.csv", text, size, config)
        faults += [row.raw for row in bad if row.reason == NEVER_CLOSES] == ['1,"never closed,2']
        lines = list(io.StringIO(text, newline=""))
        for row, line in zip(rows, where, strict=True):
            assert row == next(csv.reader(lines[line - 1 :]))
        # The rows before and after it are those of the csv module, which knows nothing of what is between.
        parts = [by_csv(before), by_csv(text.split("never closed,2\n")[1])]
        assert rows == parts[0][0] + parts[1][0]
        assert len(bad) == len(parts[0][1]) + 1 + len(parts[1][1])
    assert faults == 20


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_of_more_bytes_than_are_read_is_set_aside_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(csv_blocks, "RECORD_BYTES", 400)
    for size in (16, 23):
        for width in range(900, 900 + size):
            text = f"1,2,3{end}{'x' * width},{'x' * width},4{end}5,6,7{end}"
            config = DataConfig(encoding=("utf-8", "utf-8-sig")[width % 2])
            rows, bad, where = by_blocks(tmp_path / "t.csv", text, size, config)
            assert (rows, where) == ([["1", "2", "3"], ["5", "6", "7"]], [1, 3])
            assert [(row.line, row.reason) for row in bad] == [(2, "more than 400 bytes without a line break")]


def test_inch_marks_among_line_breaks_in_a_large_file(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tables, "read_blocks", lambda file, config, size=1 << 12: read_blocks(file, config, size))
    rows = [(number, '6" nail' if number % 3 else f"of {number % 5}\nlines", number % 2) for number in range(4000)]
    text = "".join(f"{n},{t},{y}\n" if '"' in t else f'{n},"{t}",{y}\n' for n, t, y in rows)
    data = prepared("n,t,y\n" + text)
    assert data.card["rows"]["kept"] == 4000
    column = next(column for column in data.card["columns"] if column["name"] == "t")
    assert sorted(text for text, _ in column["top"]) == ['6" nail', *(f"of {number}\nlines" for number in range(5))]


def test_many_lines_with_a_fault_are_not_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a compressed file, which cannot be read again from where the next line begins."""
    monkeypatch.setattr(csv_blocks, "RECORD_BYTES", 200)
    looked: list[int] = []
    whole = csv_blocks.last_record_end

    def last_record_end(data: bytes, config: DataConfig) -> int:
        looked.append(len(data))
        return whole(data, config)

    monkeypatch.setattr(csv_blocks, "last_record_end", last_record_end)
    text = '5" nail,1,"broken\n' * 300 + "1,2,3\n" * 300
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    size = (tmp_path / "t.csv.gz").stat().st_size
    blocks = list(read_blocks(SourceFile(str(tmp_path / "t.csv.gz"), size), DataConfig(), 100))
    assert sum(bool(block.fault) for block in blocks) > 10
    assert max(looked) <= 200 + 2 * 100
    assert b"".join(block.data for block in blocks) == text.encode()
