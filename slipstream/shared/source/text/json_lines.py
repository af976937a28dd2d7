"""JSON Lines: one object per line. Values are read as text, and types are inferred as for CSV."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.text.csv_blocks import ParsedBlock, TextBlock, parse_faulty_block

RAW_CHARACTERS = 200


def parse_sample(file: SourceFile, blocks: Iterable[TextBlock], config: DataConfig) -> list[ParsedBlock]:
    """Parse blocks, the first from the start of a file; raise ``UserError`` if no object there has a value."""
    parsed = [parse_json_block(block, [], config) for block in blocks]
    if not parsed or not parsed[0].table.num_columns:
        bad = parsed[0].bad if parsed else []
        why = f" (line {bad[0].line:,}: {bad[0].reason})" if bad else ""
        raise UserError(f"{file.uri}: holds no JSON object with a value{why}; expected one object on each line")
    return parsed


def parse_json_block(block: TextBlock, names: list[str], config: DataConfig) -> ParsedBlock:
    """Parse a block into text columns: ``names`` first, then every other key that occurs.

    Numbers keep their digits. Lists and objects stay JSON text.
    """
    if block.fault:
        return parse_faulty_block(block, names)
    rows: list[dict[str, object]] = []
    lines: list[int] = []
    bad: list[BadRow] = []
    for number, line in enumerate(block.data.splitlines(), start=block.first_line):
        if not line.strip():
            continue
        try:
            rows.append(object_on(line))
            lines.append(number)
        except BadJsonLine as error:
            raw = line[: 4 * RAW_CHARACTERS].decode("utf-8", "replace")[:RAW_CHARACTERS]
            bad.append(BadRow(block.file, number, "", str(error), raw))
    names = list(dict.fromkeys([*names, *(name for row in rows for name in row)]))
    undeclared = [name for name in names if name not in config.types]
    nested = [name for name in undeclared if any(isinstance(row.get(name), dict | list) for row in rows)]
    columns = {name: pa.array([text_of(row.get(name)) for row in rows], pa.string()) for name in names}
    return ParsedBlock(block.file, pa.table(columns), np.array(lines, np.int64), bad, nested)


class BadJsonLine(Exception):
    """Error for a line that is not a row; its message is the reason."""


def object_on(line: bytes) -> dict[str, object]:
    """Return the object on a line, with numbers as texts; raise ``BadJsonLine`` if there is none."""
    try:
        value = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        raise BadJsonLine("not JSON") from None
    if not isinstance(value, dict):
        raise BadJsonLine("not a JSON object")
    if b"\\u" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadJsonLine("half of a surrogate pair, which is not valid text") from None
        if any(name.startswith("\0") for name in value):
            raise BadJsonLine("a key that starts with NUL")
    return value


def text_of(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False)
