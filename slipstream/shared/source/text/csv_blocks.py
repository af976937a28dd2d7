"""Delimited text (CSV), cut into blocks of complete records and parsed; every bad record is reported."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile, cannot_be_read
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.text.record_ends import (
    breaks_in,
    count_breaks,
    ends_in_quotes,
    first_line_end,
    last_record_end,
)
from slipstream.shared.source.unsupported_formats import MOST_BEGINNING, unsupported_beginning

if TYPE_CHECKING:
    from _csv import Reader

BLOCK_BYTES = 12 << 20
#: Largest record size in bytes that is always supported. An unfinished record longer than this and a block is bad.
RECORD_BYTES = 4 << 20
#: Number of bytes kept of a bad line.
FAULTY_BYTES = 2 << 10
NEVER_CLOSES = "a quote opens here and never closes"


@dataclass(frozen=True)
class TextBlock:
    """Complete records of one file in UTF-8; ``first_line`` counts from 1.

    ``content`` is None if the bytes are in a local file at ``offset``.

    A block with a ``fault`` holds the start of one line that is not a record; ``fault`` is the reason.
    """

    file: str
    first_line: int
    offset: int
    size: int
    content: bytes | None = None
    fault: str = ""

    @cached_property
    def data(self) -> bytes:
        """Content, read from the file if necessary; raises ``UserError`` if the file was truncated meanwhile."""
        if self.content is not None:
            return self.content
        with SourceFile(self.file, self.offset + self.size).open() as source:
            source.seek(self.offset)
            data = source.read(self.size)
        if len(data) != self.size:
            raise UserError(f"{self.file}: was truncated while it was read; start again when no process writes to it")
        return data


@dataclass(frozen=True)
class ParsedBlock:
    """Parsed block: ``table`` has one text column per name, not converted yet.

    ``lines`` (int64 ``[rows]``) is the line in ``file`` on which each record starts. ``nested`` names columns that hold
    lists or objects and are not used.
    """

    file: str
    table: pa.Table
    lines: np.ndarray
    bad: list[BadRow] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)

    @property
    def read(self) -> int:
        return len(self.lines) + len(self.bad)


class Utf8Stream:
    """Reader of a file that decompresses, converts to UTF-8 and removes the byte-order mark."""

    def __init__(self, file: SourceFile, config: DataConfig) -> None:
        self._file = file
        self._encoding = config.encoding
        codec = codecs.lookup(config.encoding)
        self._decoder = None if codec.name == "utf-8" else codec.incrementaldecoder()
        raw = file.open()
        self._raw = raw if file.compression is None else pa.CompressedInputStream(raw, file.compression)
        #: True if the bytes are those of a local file, without decompression or conversion.
        self.plain = file.local and file.compression is None and self._decoder is None
        #: Number of bytes read of the decompressed file.
        self.offset = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes in UTF-8, from at most ``size`` bytes of the file; empty at its end.

        Raise ``UserError`` for damage and for an unsupported format.
        """
        try:
            data = self._raw.read(size)
        except (OSError, EOFError, pa.ArrowException) as error:
            if isinstance(error, OSError) and error.errno:
                raise cannot_be_read(self._file.uri, error) from None
            raise UserError(f"{self._file.uri}: cannot be decompressed after byte {self.offset:,}: {error}") from None
        first, self.offset = self.offset == 0, self.offset + len(data)
        if first and self._decoder is None and (unsupported := unsupported_beginning(data[:MOST_BEGINNING])):
            raise UserError(f"{self._file.uri}: {unsupported}")
        if self._decoder is not None:
            try:
                data = self._decoder.decode(data, final=not data).encode()
            except UnicodeError as error:
                at = self.offset - len(data) + 1 + (error.start if isinstance(error, UnicodeDecodeError) else 0)
                raise UserError(
                    f"{self._file.uri}: byte {at:,} is not {self._encoding}; set data.encoding to the encoding of the "
                    "file"
                ) from None
        return data.removeprefix(codecs.BOM_UTF8) if first else data

    def back(self, size: int) -> None:
        """Seek back by ``size`` bytes, in a plain file only."""
        self.offset -= size
        self._raw.seek(self.offset)

    def close(self) -> None:
        self._raw.close()

    def __enter__(self) -> Utf8Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_blocks(file: SourceFile, config: DataConfig, block_bytes: int = BLOCK_BYTES) -> Iterator[TextBlock]:
    """Yield the file in blocks that end at record ends, so no block starts or ends within a value.

    If a quote is never closed, its line becomes a block with a ``fault``, and reading restarts after it. Raise
    ``UserError`` at the first byte that is not UTF-8.
    """
    line, rest, more = 1, b"", True
    with Utf8Stream(file, config) as stream:
        while True:
            data = stream.read(block_bytes) if more else b""
            last, more = more and not data, True
            whole, fault = rest + data if rest else data, ""
            end = len(whole) if last else last_record_end(whole, config)
            if not last and not end:
                if len(whole) <= block_bytes + RECORD_BYTES:
                    rest = whole
                    continue
                end = first_line_end(whole)
                fault = NEVER_CLOSES if end else f"more than {RECORD_BYTES:,} bytes without a line break"
            check_utf8(whole, end, file.uri, line)
            size = min(end or len(whole), FAULTY_BYTES) if fault else end
            if size:
                content = None if stream.plain else whole[:size]
                yield TextBlock(file.uri, line, stream.offset - len(whole), size, content, fault)
            line += count_breaks(whole, end)
            if fault and not end:
                whole, line = beyond_line(stream, whole, block_bytes), line + 1
            if last:
                return
            if stream.plain:
                stream.back(len(whole) - end)
            rest = b"" if stream.plain else whole[end:]
            # The text after a faulty line may already be a block or more.
            more = len(rest) < block_bytes


def sample_blocks(file: SourceFile, config: DataConfig, head_bytes: int, place_bytes: int) -> Iterator[TextBlock]:
    """Yield blocks from the start, the middle and the end of a file, or its start if it must be decoded."""
    head = next(read_blocks(file, config, head_bytes), None)
    if head is None:
        return
    yield head
    if file.compression is not None or codecs.lookup(config.encoding).name != "utf-8":
        return
    with file.open() as source:
        for offset in ((file.size - place_bytes) // 2, file.size - place_bytes):
            if offset < head.offset + head.size:
                continue
            source.seek(offset)
            data = source.read(place_bytes)
            lines = data[data.find(b"\n") + 1 : data.rfind(b"\n") + 1]
            with suppress(UnicodeDecodeError):  # reported with its line when all rows are read
                lines.decode()
                yield TextBlock(file.uri, 1, offset, len(lines), lines)


def beyond_line(stream: Utf8Stream, data: bytes, block_bytes: int) -> bytes:
    """Read up to the end of the last line in ``data``, which is incomplete; return the bytes after it."""
    while not (end := first_line_end(data)):
        more = stream.read(block_bytes)
        if not more:
            return b""
        data = data[-1:] + more
    return data[end:]


def check_utf8(data: bytes, end: int, file: str, first_line: int) -> None:
    """Raise ``UserError`` unless ``data[:end]`` is UTF-8."""
    if data.isascii():
        return
    try:
        codecs.utf_8_decode(memoryview(data)[:end], "strict", True)
    except UnicodeDecodeError as error:
        line_start = 1 + max(data.rfind(b"\n", 0, error.start), data.rfind(b"\r", 0, error.start))
        line = first_line + count_breaks(data, error.start)
        raise UserError(
            f"{file}, line {line:,}, byte {error.start - line_start + 1}: 0x{data[error.start]:02x} is not "
            'UTF-8; set data.encoding to the encoding of the file, for example "latin-1" or "cp1252"'
        ) from None


def read_header(file: SourceFile, config: DataConfig) -> list[str]:
    """Return the names in the first line without surrounding spaces; raise ``UserError`` if the file is empty."""
    for block in read_blocks(file, config, RECORD_BYTES):
        if block.fault:
            raise UserError(f"{file.uri}, line {block.first_line}: {block.fault}; expected a header line and rows")
        for record in csv_reader(block.data.decode(), config):
            if any("\0" in name for name in record):
                raise UserError(
                    f"{file.uri}: the header has bytes that are 0, which text does not have; if it is UTF-16, set "
                    'data.encoding to "utf-16-le" or "utf-16-be", otherwise expected a CSV'
                )
            if record:
                return [name.strip() for name in record]
    raise UserError(f"{file.uri}: is empty; expected a header line and rows")


def csv_reader(text: str, config: DataConfig) -> Reader:
    return csv_records(io.StringIO(text, newline=""), config)


def csv_records(lines: Iterable[str], config: DataConfig) -> Reader:
    csv.field_size_limit(1 << 30)
    return csv.reader(
        lines,
        delimiter=config.delimiter or ",",
        quotechar=config.quote or None,
        escapechar=config.escape or None,
        quoting=csv.QUOTE_MINIMAL if config.quote else csv.QUOTE_NONE,
    )


def parse_csv_block(block: TextBlock, names: list[str], config: DataConfig, skip_header: bool) -> ParsedBlock:
    """Parse one block; rows with too few or too many fields and records with unclosed quotes are bad."""
    if block.fault:
        return parse_faulty_block(block, names)
    if ends_in_quotes(block.data, config):
        return parse_carefully(block, names, config, skip_header)
    ragged: list[pacsv.InvalidRow] = []

    def set_aside(row: pacsv.InvalidRow) -> str:
        ragged.append(row)
        return "skip"

    try:
        table = pacsv.read_csv(
            pa.BufferReader(block.data),
            pacsv.ReadOptions(
                column_names=names, use_threads=False, block_size=len(block.data) + 1, skip_rows_after_names=0
            ),
            pacsv.ParseOptions(
                delimiter=config.delimiter or ",",
                quote_char=config.quote or False,
                escape_char=config.escape or False,
                newlines_in_values=True,
                invalid_row_handler=set_aside,
            ),
            pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False, check_utf8=False
            ),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            return ParsedBlock(block.file, empty_table(names), np.empty(0, np.int64))
        return parse_carefully(block, names, config, skip_header)
    records = table.num_rows + len(ragged)
    starts = record_lines(block, records, config)
    if starts is None:
        return parse_carefully(block, names, config, skip_header)
    good = np.ones(records, bool)
    # Arrow numbers the records of the block from 1 and skips empty lines.
    good[[row.number - 1 for row in ragged]] = False
    bad = [
        BadRow(block.file, int(starts[row.number - 1]), "", width(row.actual_columns, len(names)), row.text)
        for row in ragged
    ]
    lines = starts[good]
    if skip_header and records:
        table, lines, bad = (table.slice(1), lines[1:], bad) if good[0] else (table, lines, bad[1:])
    return ParsedBlock(block.file, table, lines, bad)


def parse_faulty_block(block: TextBlock, names: list[str]) -> ParsedBlock:
    bad = BadRow(block.file, block.first_line, "", block.fault, block.data.decode(errors="replace").rstrip("\r\n"))
    return ParsedBlock(block.file, empty_table(names), np.empty(0, np.int64), [bad])


def width(fields: int, expected: int) -> str:
    return f"{fields} fields, expected {expected}"


def empty_table(names: list[str]) -> pa.Table:
    return pa.table({name: pa.array([], pa.string()) for name in names})


def record_lines(block: TextBlock, records: int, config: DataConfig) -> np.ndarray | None:
    """Return the lines on which records start (int64 ``[records]``); ``None`` unless ``records`` are found."""
    data = np.frombuffer(block.data, np.uint8)
    starts = np.concatenate([[0], breaks_in(data) + 1])
    first = data[starts[starts < len(data)]]
    empty = (first == ord("\n")) | (first == ord("\r"))
    lines = np.flatnonzero(~empty)
    if len(lines) != records:
        # Values with line breaks: the csv module knows the line on which each record ends.
        text = block.data.decode()
        reader, ends, previous = csv_reader(text, config), [], 0
        for record in reader:
            if record:
                ends.append(previous)
            previous = reader.line_num
        lines = np.array(ends, np.int64)
        if len(lines) != records:
            return None
    return lines.astype(np.int64) + block.first_line


def parse_carefully(block: TextBlock, names: list[str], config: DataConfig, skip_header: bool) -> ParsedBlock:
    """Parse a block record by record, more slowly, to find the next good record after an unclosed quote."""
    lines = list(io.StringIO(block.data.decode(), newline=""))
    rows: list[list[str]] = []
    starts: list[int] = []
    bad: list[BadRow] = []
    at, header = 0, skip_header
    while at < len(lines):
        used, record = next_record(lines, at, config)
        line, raw = block.first_line + at, lines[at].rstrip("\r\n")
        at += used
        if record == []:
            continue
        if header:
            header = False
        elif record is None:
            bad.append(BadRow(block.file, line, "", NEVER_CLOSES, raw))
        elif len(record) != len(names):
            bad.append(BadRow(block.file, line, "", width(len(record), len(names)), raw))
        else:
            rows.append(record)
            starts.append(line)
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    table = pa.table({name: pa.array(list(column), pa.string()) for name, column in zip(names, columns, strict=True)})
    return ParsedBlock(block.file, table, np.array(starts, np.int64), bad)


def next_record(lines: list[str], at: int, config: DataConfig) -> tuple[int, list[str] | None]:
    """Return the number of lines of the record that starts on line ``at``, and its fields.

    The fields are [] for an empty line and ``None`` if a quote is not closed; then only the first line is consumed.
    """
    closed = True

    def following() -> Iterator[str]:
        nonlocal closed
        yield from map(lines.__getitem__, range(at, len(lines)))
        closed = False  # the reader asked for a line after the last one: it is inside quotes

    reader = csv_records(following(), config)
    record = next(reader, None)
    return (reader.line_num, record) if closed else (1, None)
