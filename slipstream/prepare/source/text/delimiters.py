"""Which character separates the fields of a CSV, where the user does not say."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import islice
from pathlib import Path

from slipstream.errors import UserError
from slipstream.prepare.config import DataConfig
from slipstream.prepare.source.files import SourceFile
from slipstream.prepare.source.text.csv_blocks import csv_reader, read_blocks

USUAL = ","
OTHERS = (";", "\t", "|")
#: As many records have to agree, or all if there are fewer.
AGREEING = 20
SAMPLE_BYTES = 64 << 10


def detect_delimiter(files: list[SourceFile], config: DataConfig) -> tuple[str, list[str]]:
    """The delimiter of all ``files``, and a word on it if it is none that their names tell.

    Raises ``UserError`` if they do not agree.
    """
    if config.delimiter:
        return config.delimiter, []
    found = {file.uri: delimiter_of(file, config) for file in files}
    first, mark = next(iter(found.items()))
    other = next((uri for uri, theirs in found.items() if theirs != mark), None)
    if other:
        raise UserError(
            f"{other}: its fields are separated by {found[other]!r}, but by {mark!r} in {first}; expected one mark in "
            "all files, which data.delimiter names if it was not found"
        )
    if mark == USUAL or all(map(has_tabs, files)):
        return mark, []
    where = first if len(files) == 1 else f"{first} and {len(files) - 1:,} more"
    return mark, [f"delimiter {mark!r} detected in {where}: if it is another, set data.delimiter"]


def delimiter_of(file: SourceFile, config: DataConfig) -> str:
    """A tab for ``.tsv``. Otherwise a comma, unless the first line has none and there is one other mark that cuts all
    of the first records, the header among them, into the same number of fields."""
    taken = (config.quote, config.escape)
    if has_tabs(file) and "\t" not in taken:
        return "\t"
    block = next(read_blocks(file, config, SAMPLE_BYTES), None)
    if block is None or any(len(record) > 1 for record in records(block.data, USUAL, config)[:1]):
        return USUAL
    fitting = [mark for mark in OTHERS if mark not in taken and cuts_alike(block.data, mark, config)]
    return fitting[0] if len(fitting) == 1 else USUAL


def has_tabs(file: SourceFile) -> bool:
    """Whether the name says so, with or without a compression."""
    return ".tsv" in [suffix.lower() for suffix in Path(file.name).suffixes[-2:]]


def cuts_alike(data: bytes, mark: str, config: DataConfig) -> bool:
    widths = {len(record) for record in records(data, mark, config)}
    return len(widths) == 1 and widths.pop() > 1


def records(data: bytes, mark: str, config: DataConfig) -> list[list[str]]:
    """The first records that are not empty, cut by ``mark``; none if they cannot be read."""
    reader = csv_reader(data.decode(), replace(config, delimiter=mark))
    try:
        return list(islice(filter(None, reader), AGREEING))
    except csv.Error:
        return []
