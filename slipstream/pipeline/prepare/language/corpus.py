"""Division of a corpus into independently readable chunks: some files, a range of lines, or a row group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, BinaryIO, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.pipeline.prepare.resolve import SourceToPrepare
from slipstream.shared.errors import UserError
from slipstream.shared.source.columnar import damage_named
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow

#: Size of a chunk in bytes. It is constant, since it decides the order of quarantined rows.
PIECE_BYTES = 16 << 20
PIECE_FILES = 4096
#: Largest document in bytes, limited by the memory for processing it.
MOST_BYTES = 256 << 20
EXPECTED = "expected a column 'text', or 'prompt' and 'completion', or 'messages'"

#: Kind of a corpus's rows: a text, a question with its answer, or the messages of a conversation.
Shape = Literal["text", "prompt", "messages"]
COLUMNS: dict[Shape, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
#: Column of the tools that the messages of a row may call.
TOOLS = "tools"


@dataclass(frozen=True)
class CorpusChunk:
    """Chunk of a corpus; it has several ``files`` only if each is a document.

    ``start`` and ``stop`` are row groups or batches of columnar files, with ``first_row`` rows before. In JSON Lines
    they are bytes: a chunk has the lines that start between them.
    """

    files: tuple[SourceFile, ...]
    format: str
    shape: Shape
    start: int = 0
    stop: int = 0
    first_row: int = 0


class CorpusRecord(NamedTuple):
    """Row of a file, or a whole file as a text: source, line and values."""

    file: str
    line: int
    values: dict[str, Any]


class BlankLine(NamedTuple):
    """Empty line of a JSON Lines file."""

    line: int


def corpus_chunks(source: SourceToPrepare) -> list[CorpusChunk]:
    """Return all chunks in file order.

    Raise ``UserError`` for files without the expected columns or with different columns.
    """
    if source.format == "text":
        return groups_of_files(source.files)
    pieces: list[CorpusChunk] = []
    for file in source.files:
        of_file = lines_of(file) if source.format == "json" else row_groups(file, source.format)
        if of_file and pieces and of_file[0].shape != pieces[0].shape:
            raise UserError(
                f"{file.uri}: holds {' and '.join(map(repr, COLUMNS[of_file[0].shape]))}, unlike "
                f"{pieces[0].files[0].uri}; expected the same columns in all files"
            )
        pieces += of_file
    if not pieces:
        raise UserError(f"data: {source.address!r} has no rows; {EXPECTED}")
    return pieces


def groups_of_files(files: tuple[SourceFile, ...]) -> list[CorpusChunk]:
    groups: list[list[SourceFile]] = []
    size = PIECE_BYTES
    for file in files:
        if size >= PIECE_BYTES or len(groups[-1]) >= PIECE_FILES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [CorpusChunk(tuple(group), "text", "text") for group in groups]


def lines_of(file: SourceFile) -> list[CorpusChunk]:
    """Return the chunks of a JSON Lines file; a compressed file is one chunk, as it can only be read from the start."""
    with open_lines(file) as stream:
        first = next((line for line in stream if line.strip()), b"")
    if not first:
        return []
    found = parse_json_line(file, first)
    shape = shape_of(found, file) if isinstance(found, dict) else "text"
    step = file.size if file.compression else PIECE_BYTES
    return [CorpusChunk((file,), "json", shape, start, start + step) for start in range(0, file.size, step)]


def row_groups(file: SourceFile, format: str) -> list[CorpusChunk]:
    with damage_named(file.uri, format), file.open() as stream:
        if format == "arrow":
            batches = pa.ipc.open_file(stream)
            names = batches.schema.names
            rows = [batches.get_batch(index).num_rows for index in range(batches.num_record_batches)]
        else:
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)
            names = parquet.schema_arrow.names
            rows = [parquet.metadata.row_group(index).num_rows for index in range(parquet.num_row_groups)]
    shape = shape_of(names, file)
    return [CorpusChunk((file,), format, shape, index, index + 1, sum(rows[:index])) for index in range(len(rows))]


def shape_of(names: Any, file: SourceFile) -> Shape:
    for shape, columns in COLUMNS.items():
        if all(column in names for column in columns):
            return shape
    raise UserError(f"{file.uri}: has the columns {', '.join(map(repr, sorted(names)))}; {EXPECTED}")


def read_piece(piece: CorpusChunk, encoding: str, column: str = "") -> Iterator[CorpusRecord | BadRow | BlankLine]:
    """Yield records, bad rows and blank lines; lines of JSON Lines are counted from the chunk's start.

    Records of tables have ``column``, too.
    """
    if piece.format == "text":
        yield from (read_file(file, encoding) for file in piece.files)
    elif piece.format == "json":
        yield from read_lines(piece)
    else:
        yield from read_rows(piece, column)


def read_file(file: SourceFile, encoding: str) -> CorpusRecord | BadRow:
    if file.size > MOST_BYTES:
        return BadRow(file.uri, 1, "", f"{file.size:,} bytes, more than {MOST_BYTES:,}", "")
    with file.open() as stream:
        raw = stream.read()
    try:
        text = raw.decode(encoding).removeprefix("\ufeff")
        text.encode()  # some codecs decode to lone surrogates, which are not text
    except UnicodeError as error:
        return BadRow(file.uri, 1, "", f"not {encoding} (data.encoding)", str(error))
    return CorpusRecord(file.uri, 1, {"text": text})


def read_lines(piece: CorpusChunk) -> Iterator[CorpusRecord | BadRow | BlankLine]:
    (file,) = piece.files
    with open_lines(file) as stream:
        # A line that crosses the start of a chunk belongs to the chunk before.
        place = piece.start
        if piece.start:
            stream.seek(piece.start - 1)
            place += len(stream.readline()) - 1
        number = 0
        while file.compression or place < piece.stop:
            line = stream.readline()
            if not line:
                return
            place += len(line)
            number += 1
            if not line.strip():
                yield BlankLine(number)
                continue
            found = parse_json_line(file, line)
            if isinstance(found, dict):
                yield CorpusRecord(file.uri, number, found)
            else:
                yield BadRow(file.uri, number, "", found, line[:500].decode(errors="replace"))


def parse_json_line(file: SourceFile, line: bytes) -> dict[str, Any] | str:
    """Return the JSON object on a line, or the reason why there is none."""
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "not JSON"
    return found if isinstance(found, dict) else "not a JSON object"


def read_rows(piece: CorpusChunk, column: str) -> Iterator[CorpusRecord]:
    (file,) = piece.files
    columns = [*COLUMNS[piece.shape], *([] if piece.shape == "text" else [TOOLS]), *([column] if column else [])]
    with damage_named(file.uri, piece.format), file.open() as stream:
        if piece.format == "arrow":
            batch = pa.ipc.open_file(stream).get_batch(piece.start)
            rows = pa.Table.from_batches([batch]).select([name for name in columns if name in batch.schema.names])
        else:
            parquet = pq.ParquetFile(stream, page_checksum_verification=True)
            names = [name for name in columns if name in parquet.schema_arrow.names]
            rows = parquet.read_row_group(piece.start, columns=names, use_threads=False)
        listed = rows.to_pylist()
    for number, values in enumerate(listed, piece.first_row + 1):
        yield CorpusRecord(file.uri, number, without_nulls(values))


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def open_lines(file: SourceFile) -> BinaryIO:
    """Open a file for reading lines, decompressed according to its suffix."""
    stream: Any = file.open()
    if file.compression:
        stream = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), file.compression)
        return BufferedReader(stream)
    return stream
