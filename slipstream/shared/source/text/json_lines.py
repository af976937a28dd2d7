"""JSON Lines: one object per line. Values are read as text, and types are inferred as for CSV."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import pyarrow as pa

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.text.csv_blocks import ParsedBlock, TextBlock, parse_faulty_block

RAW_CHARACTERS = 200
#: Limits of a block's table: columns, and values with nulls, which take half a gigabyte and two seconds.
MOST_KEYS, MOST_VALUES = 20_000, 1 << 27


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
    found: dict[str, dict[int, object]] = {name: {} for name in names}
    lines: list[int] = []
    bad: list[BadRow] = []
    for number, line in enumerate(block.data.splitlines(), start=block.first_line):
        if not line.strip():
            continue
        try:
            row = object_on(line)
        except BadJsonLine as error:
            raw = line[: 4 * RAW_CHARACTERS].decode("utf-8", "replace")[:RAW_CHARACTERS]
            bad.append(BadRow(block.file, number, "", str(error), raw))
            continue
        for name, value in row.items():
            found.setdefault(name, {})[len(lines)] = value
        lines.append(number)
        check_keys(found, lines, block.file)
    nested = [
        name
        for name, values in found.items()
        if name not in config.types and any(isinstance(value, dict | list) for value in values.values())
    ]
    columns = {name: text_column(values, len(lines)) for name, values in found.items()}
    return ParsedBlock(block.file, pa.table(columns), np.array(lines, np.int64), bad, nested)


def check_keys(keys: Collection[str], lines: list[int], file: str) -> None:
    """Raise ``UserError`` for too many keys for their rows."""
    if len(keys) > MOST_KEYS or len(keys) * len(lines) > MOST_VALUES:
        raise UserError(
            f"{file}: line {lines[-1]:,}: there are {len(keys):,} different keys since line {lines[0]:,}, such as "
            f"{list(keys)[-1]!r:.40}; expected at most {MOST_KEYS:,}, or fewer if most lines lack most of them, since "
            'each is a column. If keys are ids or dates, write them as values: {"id": …, "value": …}'
        )


def text_column(values: Mapping[int, object], rows: int) -> pa.Array:
    """Return a text column from its values by row; other rows are null."""
    texts: list[str | None] = [None] * rows
    for row, value in values.items():
        texts[row] = text_of(value)
    return pa.array(texts, pa.string())


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
