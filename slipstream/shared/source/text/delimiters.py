"""Delimiter of CSV files, detected from their first records."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import islice
from pathlib import Path

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.text.csv_blocks import csv_reader, read_blocks

#: Bytes of every file that show the delimiter.
DELIMITER_BYTES = 64 << 10
USUAL_DELIMITER = ","
OTHER_DELIMITERS = (";", "\t", "|")
#: Number of records, or all if there are fewer, that a delimiter must cut into equally many fields.
AGREEING = 20


def detect_delimiter(files: list[SourceFile], config: DataConfig) -> tuple[str, list[str]]:
    """Return the delimiter of all files, with a warning if it is neither a comma nor implied by the file names.

    Raise ``UserError`` if the files disagree.
    """
    if config.delimiter:
        return config.delimiter, []
    delimiters = {file.uri: delimiter_of(file, config) for file in files}
    first, mark = next(iter(delimiters.items()))
    other = next((uri for uri, delimiter in delimiters.items() if delimiter != mark), None)
    if other:
        raise UserError(
            f"{other}: its fields are separated by {delimiters[other]!r}, but by {mark!r} in {first}; expected one "
            "delimiter in all files; set data.delimiter if the detected one is wrong"
        )
    if mark == USUAL_DELIMITER or all(map(has_tabs, files)):
        return mark, []
    where = first if len(files) == 1 else f"{first} and {len(files) - 1:,} more"
    return mark, [f"delimiter {mark!r} detected in {where}: if it is wrong, set data.delimiter"]


def delimiter_of(file: SourceFile, config: DataConfig) -> str:
    """Return the delimiter of a file: a tab for ``.tsv``, else usually a comma.

    Another mark is returned if the first line has no comma, and only this mark cuts all first records, with the header,
    into equally many fields.
    """
    taken = (config.quote, config.escape)
    if has_tabs(file) and "\t" not in taken:
        return "\t"
    block = next(read_blocks(file, config, DELIMITER_BYTES), None)
    if block is None or block.fault:
        return USUAL_DELIMITER
    if any(len(record) > 1 for record in first_records(block.data, USUAL_DELIMITER, config)[:1]):
        return USUAL_DELIMITER
    fitting = [mark for mark in OTHER_DELIMITERS if mark not in taken and cuts_alike(block.data, mark, config)]
    return fitting[0] if len(fitting) == 1 else USUAL_DELIMITER


def has_tabs(file: SourceFile) -> bool:
    return ".tsv" in [suffix.lower() for suffix in Path(file.name).suffixes[-2:]]


def cuts_alike(data: bytes, mark: str, config: DataConfig) -> bool:
    widths = {len(record) for record in first_records(data, mark, config)}
    return len(widths) == 1 and widths.pop() > 1


def first_records(data: bytes, mark: str, config: DataConfig) -> list[list[str]]:
    """Return the first non-empty records, cut by ``mark``; none if they cannot be parsed."""
    reader = csv_reader(data.decode(), replace(config, delimiter=mark))
    try:
        return list(islice(filter(None, reader), AGREEING))
    except csv.Error:
        return []
