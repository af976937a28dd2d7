"""Bad rows are counted in memory and stored on disk, in file order, and end preparation once the limit is exceeded."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.source import quarantine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow, QuarantinedRows, read_quarantine
from slipstream.shared.source.text import csv_blocks, delimiters, text_tables
from tests.support import REPOSITORY
from tests.support.tables import Prepare
from tests.support.wording import refuses

#: Prepares the table in argv[1] with argv[3] MiB more address space than a first, small table took.
PREPARE = """
import resource, sys
from pathlib import Path
import pandas, scipy.special  # the second table may be the first to need them
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts import format
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.text import csv_blocks

format.LONGEST_MANIFEST = 1 << 20  # read into a buffer of that size
csv_blocks.read_blocks.__defaults__ = (1 << 18,)
config = DataConfig(types={"x": "number"}, quarantine_limit=1.0)
table, into = Path(sys.argv[1]), Path(sys.argv[2])
small = into.with_suffix(".csv")
small.write_text("".join(table.open().readlines(40_000)))
prepare(into.with_name("small"), str(small), "y", config, {}, workers=1)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (int(sys.argv[3]) << 20),) * 2)
prepare(into, str(table), "y", config, {}, workers=1)
"""


@pytest.mark.prove
@pytest.mark.parametrize("rows", [120_000])
def test_bad_rows_take_no_memory_that_grows_with_them(rows: int, tmp_path: Path) -> None:
    """In memory, 90,000 rows with a wrong decimal mark and many digits would take more than 80 MB."""
    path = tmp_path / "t.csv"
    with path.open("w") as file:
        file.write("x;y\n")
        file.writelines(f"{i:0400d},5;n\n" if i % 4 else f"{i % 97}.5;{'ny'[i // 4 % 2]}\n" for i in range(rows))
    command = [sys.executable, "-c", PREPARE, str(path), str(tmp_path / "made"), "100"]
    # Other allocators reserve addresses that they may never use, such as 64 MiB for every thread.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = pq.read_table(tmp_path / "made/quarantine.parquet")
    assert found["line"].to_pylist() == [i + 2 for i in range(rows) if i % 4]


def in_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let text files be read in blocks of ``size`` bytes."""

    def read_blocks(file: SourceFile, config: DataConfig, block_bytes: int = size) -> Iterator[csv_blocks.TextBlock]:
        return original(file, config, min(block_bytes, size))

    original = csv_blocks.read_blocks
    monkeypatch.setattr(csv_blocks, "read_blocks", read_blocks)
    for module in (text_tables, delimiters):
        monkeypatch.setattr(module, "read_blocks", read_blocks)


def test_rows_are_in_file_order_whatever_is_wrong_with_them(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_blocks(monkeypatch, 300)
    monkeypatch.setattr(quarantine, "SPOOLED", 7)
    monkeypatch.setattr(quarantine, "ROW_GROUP", 20)
    faults = {0: "{i},1,2,x,y", 1: "{i},eight,2,n", 2: "seven,{i},3,n", 3: "{i},inf,2,n", 4: "{i},4,5,"}
    expected = {0: ("", "5 fields, expected 4"), 1: ("b", "not number"), 2: ("a", "not number")}
    expected |= {3: ("b", "infinite"), 4: ("y", "the target is missing")}
    wrong: list[tuple[str, int, str, str]] = []
    (tmp_path / "t").mkdir()
    for name in ("1.csv", "2.csv"):
        lines = ["a,b,c,y"]
        for i in range(400):
            fault = i // 5 % 5 if i % 5 == 3 else None
            lines.append(f"{i},{i % 7},{i % 3},{'ny'[i % 2]}" if fault is None else faults[fault].format(i=i))
            if fault is not None:
                wrong.append((name, i + 2, *expected[fault]))
        (tmp_path / "t" / name).write_text("\n".join(lines))
    data = prepared(tmp_path / "t", types={"a": "number", "b": "number"}, quarantine_limit=0.5)
    found = [(Path(row.file).name, row.line, row.column, row.reason) for row in read_quarantine(data.artifact)]
    assert sorted(found) == sorted(wrong) and data.card["rows"]["quarantined"] == len(wrong) == 160
    of_parsing = [each for each in found if each[3] not in ("infinite", "the target is missing")]
    assert of_parsing == sorted(of_parsing) and found[len(of_parsing) :] == sorted(found[len(of_parsing) :])


def csv_table(path: Path, bad: range, rows: int) -> None:
    """A table whose last line is not UTF-8, so reading it is an error of its own."""
    lines = [f"{i},{i % 7}" if i in bad else f"{i},{i % 7},{i % 2}" for i in range(rows)]
    path.write_bytes("\n".join(["a,b,y", *lines, ""]).encode() + b"1,\xe9,1\n")


def parquet_table(path: Path, bad: range, rows: int) -> None:
    """A table in row groups of 100 rows, the last one damaged."""
    numbers = np.where(np.isin(np.arange(rows), bad), np.inf, np.arange(rows) % 13)
    table = pa.table({"a": numbers, "b": np.arange(rows) % 7, "y": np.arange(rows) % 2})
    pq.write_table(table, path, row_group_size=100, write_page_checksum=True, compression="none", use_dictionary=False)
    raw = bytearray(path.read_bytes())
    raw[pq.ParquetFile(path).metadata.row_group(rows // 100 - 1).column(0).data_page_offset + 300] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(("suffix", "write"), [("csv", csv_table), ("parquet", parquet_table)])
def test_preparation_ends_when_the_limit_is_certain_to_be_exceeded(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, write: Callable[..., None]
) -> None:
    in_blocks(monkeypatch, 1000)
    monkeypatch.setattr(quarantine, "ENOUGH_TO_END", 10)
    path = tmp_path / f"t.{suffix}"
    write(path, range(400, 1000), 3000)
    with refuses(UserError, match="at least"):
        prepared(path)
    # As long as the remaining rows may be enough, all are read.
    write(path, range(400, 430), 3000)
    with refuses(UserError):
        prepared(path)


def test_reasons_without_end_are_not_all_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MOST_REASONS", 3)
    rows = [BadRow("f", line, "", f"reason {line % 50}", "") for line in range(200)]
    found = QuarantinedRows.joined([QuarantinedRows.spooled(rows[:90], tmp_path / "1"), QuarantinedRows.counted(rows)])
    assert len(found) == 290 and len(found.reasons) == 4 and found.reasons[-1].first.reason == quarantine.OTHER
    assert list(found) == rows[:90] and found.first == rows[:3]
    assert not QuarantinedRows.spooled([], tmp_path / "2").spools and not (tmp_path / "2").exists()
