"""CSV text whose records are hard to separate, and the rows that Python's csv module reads from it."""

import csv
import io
import random
from pathlib import Path

from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.text.csv_blocks import parse_csv_block, read_blocks

NAMES = ["a", "b", "c"]
PLAIN = ["", "7", "é", '6" nail', '6"', '12" x 3"', 'a""b', "'", "x" * 40]
QUOTED = ['"a\nb"', '"6"" nail"', '"\n"', '"a,b"', '""', '"a\r\n""b"', '"""\n"', '"x"y', '"x"y"', '"x\ny" "', '"a\n,"']


def drawn(draw: random.Random, cells: list[str], end: str, rows: int = 25) -> str:
    """Lines of three fields, a few of another number."""
    widths = draw.choices([3, 2, 4], [20, 1, 1], k=rows)
    return "".join(",".join(draw.choices(cells, k=width)) + end for width in widths)


def by_blocks(path: Path, text: str, size: int, config: DataConfig) -> tuple[list[list[str]], list[BadRow], list[int]]:
    """The rows, what was set aside, and the lines of the rows."""
    path.write_bytes(raw := text.encode())
    rows, bad, lines = [], [], []
    for block in read_blocks(SourceFile(str(path), len(raw)), config, size):
        parsed = parse_csv_block(block, NAMES, config, skip_header=False)
        rows += [list(row.values()) for row in parsed.table.to_pylist()]
        bad += parsed.bad
        lines += parsed.lines.tolist()
    return rows, bad, lines


def by_csv(text: str, escape: str = "") -> tuple[list[list[str]], list[tuple[int, str]], list[int]]:
    """The same of the csv module."""
    reader, rows, bad, lines, before = (
        csv.reader(io.StringIO(text, newline=""), escapechar=escape or None),
        [],
        [],
        [],
        0,
    )
    for record in reader:
        if len(record) == len(NAMES):
            rows.append(record)
            lines.append(before + 1)
        elif record:
            bad.append((before + 1, f"{len(record)} fields, expected 3"))
        before = reader.line_num
    return rows, bad, lines


def blocks_against_csv(draw: random.Random, path: Path, config: DataConfig, end: str) -> int:
    """Assert that drawn lines, cut into blocks of several sizes, have the rows that the csv module finds; the number of
    borders between blocks."""
    cells = PLAIN + QUOTED + ['6\\" nail', "a\\,b", '"a\\"\nb"'] * bool(config.escape)
    text, borders = drawn(draw, cells, end), 0
    rows, bad, lines = by_csv(text, config.escape)
    for size in (16, draw.randrange(17, 60), draw.randrange(60, 300), 1 << 20):
        found, aside, where = by_blocks(path, text, size, config)
        assert (found, where) == (rows, lines), text
        assert [(row.line, row.reason) for row in aside] == bad
        borders += len(text) // size
    return borders
