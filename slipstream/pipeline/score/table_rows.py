"""Typed batches of a table's rows, file by file, and quarantined rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from slipstream.shared.errors import UserError
from slipstream.shared.source.columnar import Unit, list_units, read_unit
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.number_formats import NumberFormat, cannot_become, missing_marks, retype_column
from slipstream.shared.source.columns.spelling import respell
from slipstream.shared.source.documents import BLOCK_FILES, read_text
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.images import (
    ArrayPart,
    DigitsPart,
    FolderPart,
    Part,
    Shape,
    open_array,
    rows_at_once,
    shape_text,
)
from slipstream.shared.source.memory import MemoryBudget
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.resolved import ResolvedSource
from slipstream.shared.source.tables import check_names, keys_in
from slipstream.shared.source.text import csv_blocks, json_lines
from slipstream.shared.source.text.csv_blocks import ParsedBlock, read_blocks
from slipstream.shared.source.text.delimiters import detect_delimiter
from slipstream.shared.source.text.text_tables import in_one, text_names

#: GiB that determine the rows per read; fewer than in preparation, as larger reads are not faster.
READ_GIB = 0.25
#: Largest valid number, as in preparation; larger ones, including infinity, do not fit float32.
LARGEST = 1e38
#: Prefix of kept columns in a batch.
KEPT = "\0kept "


@dataclass(frozen=True)
class RequestedColumns:
    """Columns to read from a table.

    ``types`` are those of the model's columns, ``keep`` those in which kept columns are written. ``number_format`` is
    the notation of values, ``spellings`` the rule of :mod:`~slipstream.shared.source.columns.spelling` per category.
    """

    types: dict[str, str]
    keep: dict[str, pa.DataType]
    number_format: NumberFormat
    spellings: dict[str, str]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.types, *self.keep]))

    def spelled(self, column: pa.Array, name: str) -> pa.Array:
        """Return a category as the model's vocabulary spells it, another column unchanged."""
        if not self.spellings.get(name):
            return column
        coded = value_types.with_dictionary(column)
        clean = value_types.clean_texts(coded.dictionary.cast(pa.string()), list(self.number_format.missing))
        return pa.DictionaryArray.from_arrays(coded.indices, respell(clean, self.spellings[name]))


@dataclass(frozen=True)
class TableBatch:
    """``read`` rows of a ``file``.

    ``columns`` has the scorable rows (kept columns with the prefix ``KEPT``), ``lines`` their lines and ``numbers``
    their numbers in the file, from 1 (int64 ``[rows]``); ``bad`` are the quarantined rows.
    """

    file: str
    read: int
    columns: pa.RecordBatch
    lines: np.ndarray
    numbers: np.ndarray
    bad: list[BadRow]


def read_table(file: SourceFile, source: ResolvedSource, wanted: RequestedColumns) -> Iterator[TableBatch]:
    """Yield all rows of one file.

    Raises ``UserError`` for a column that is missing or of another type.
    """
    if source.kind == "columnar":
        return columnar_rows(file, source, wanted)
    return text_rows(file, source, wanted)


def deciding_files(source: ResolvedSource, keep: list[str]) -> dict[str, SourceFile]:
    """Return for every kept column the first file with a value, which decides its type; empty for CSV and JSON."""
    if source.kind != "columnar":
        return {}
    found: dict[str, SourceFile] = {}
    for file in source.files:
        if not (undecided := [name for name in keep if name not in found]):
            break
        schema, units = list_units(file, source.format)
        found |= {name: file for name in undecided if name not in schema.names or holds_values(units, name)}
    return {name: found.get(name, source.files[0]) for name in keep}


def holds_values(units: list[Unit], name: str) -> bool:
    columns = (batch.column(0) for unit in units for batch, _ in read_unit(unit, [name], MemoryBudget(READ_GIB)))
    return any(value_types.nan_as_null(column).null_count < len(column) for column in columns)


def kept_types(source: ResolvedSource, keep: list[str], deciding: Mapping[str, SourceFile]) -> dict[str, pa.DataType]:
    """Return the types in which kept columns are written: of the ``deciding`` files, or text.

    Raises ``UserError`` for nested values.
    """
    kinds = dict.fromkeys(keep, pa.string())
    for name, file in deciding.items():
        schema, _ = list_units(file, source.format)
        kind = schema.field(name).type if name in schema.names else pa.string()
        if not value_types.has_values(kind):
            raise UserError(f"scoring.keep: {file.uri} holds nested values in {name!r}; remove it")
        kinds[name] = value_types.simplify_column(pa.array([], kind)).type
        if value_types.column_type(kind) == value_types.TEXT:
            kinds[name] = pa.string()
    return kinds


def check_present(file: SourceFile, names: list[str], wanted: RequestedColumns) -> None:
    for name in wanted.names:
        if name not in names:
            asked = "the model takes it" if name in wanted.types else "scoring.keep names it"
            listed = ", ".join(map(repr, names[:20])) + (" …" if len(names) > 20 else "")
            raise UserError(f"{file.uri}: has no column {name!r}, but {asked}; the columns are {listed}")


# Columnar files


def columnar_rows(file: SourceFile, source: ResolvedSource, wanted: RequestedColumns) -> Iterator[TableBatch]:
    schema, units = list_units(file, source.format)
    check_names(schema.names, file)
    partition = keys_in(source.listing.relative(file))
    check_present(file, list({**partition, **dict.fromkeys(schema.names)}), wanted)
    check_values({field.name: field.type for field in schema}, file, wanted)
    for unit in units:
        if unit.rows:
            yield from unit_rows(replace(unit, partition=partition), wanted)


def check_values(stored: Mapping[str, pa.DataType], file: SourceFile, wanted: RequestedColumns) -> None:
    for name, kind in wanted.types.items():
        if name in stored and value_types.column_type(stored[name]) == value_types.OTHER:
            raise other_type(file.uri, name, value_types.OTHER, kind)


def other_type(file: str, name: str, stored: str, kind: str) -> UserError:
    return UserError(
        f"{file}: column {name!r} holds {stored} values, but the model takes it as {kind}; expected the type that it "
        "was trained with"
    )


def unit_rows(unit: Unit, wanted: RequestedColumns) -> Iterator[TableBatch]:
    for stored, lines in read_unit(unit, wanted.names, MemoryBudget(READ_GIB)):
        yield typed_rows(stored, lines, unit.file, wanted)


def typed_rows(stored: pa.RecordBatch, lines: np.ndarray, file: str, wanted: RequestedColumns) -> TableBatch:
    """Return ``stored`` rows in the model's types."""
    columns, unreadable = {}, dict[str, np.ndarray]()
    for name, kind in wanted.types.items():
        column = stored.column(name)
        if value_types.column_type(column.type) != kind or missing_marks(wanted.number_format, kind):
            column, failed = retype_column(readable(column, name, kind, file), kind, wanted.number_format)
            unreadable[name] = failed
        columns[name] = column
    kept = {name: as_kept(stored.column(name), name, kind, file) for name, kind in wanted.keep.items()}
    return quarantine_rows(columns, kept, unreadable, RowOrigin(file, lines, lines, stored), wanted)


def readable(column: pa.Array, name: str, kind: str, file: str) -> pa.Array:
    """Return a column that can be read as ``kind``: without values, any column can.

    Raises ``UserError`` for values of another type.
    """
    stored = value_types.column_type(column.type)
    if (stored, kind) == (value_types.NUMBER, value_types.INTEGER) or not cannot_become(stored, kind):
        return column
    if value_types.nan_as_null(column).null_count < len(column):
        raise other_type(file, name, stored, kind)
    return pa.nulls(len(column), value_types.ARROW[kind])


def as_kept(column: pa.Array, name: str, kind: pa.DataType, file: str) -> pa.Array:
    if column.type == kind:
        return column
    values = value_types.nan_as_null(column)
    try:
        return pa.nulls(len(column), kind) if values.null_count == len(values) else values.cast(kind)
    except pa.ArrowException:
        raise UserError(
            f"{file}: column {name!r} is {column.type}, but {kind} in the first file with values; expected one type, "
            "or scoring.keep without it"
        ) from None


# Text


def text_rows(file: SourceFile, source: ResolvedSource, wanted: RequestedColumns) -> Iterator[TableBatch]:
    partition = {name: text for name, text in keys_in(source.listing.relative(file)).items() if name in wanted.names}
    if source.format == "json":
        yield from json_rows(file, source, partition, wanted)
        return
    delimiter, _ = detect_delimiter([file], source.config)
    config = replace(source.config, delimiter=delimiter)
    names = text_names(file, config)
    check_names(names, file)
    check_present(file, [*names, *partition], wanted)
    done = 0
    for index, block in enumerate(read_blocks(file, config)):
        parsed = csv_blocks.parse_csv_block(block, names, config, config.header and index == 0)
        yield parsed_rows(parsed, partition, wanted, done)
        done += parsed.read


def json_rows(
    file: SourceFile, source: ResolvedSource, partition: Mapping[str, str | None], wanted: RequestedColumns
) -> Iterator[TableBatch]:
    """Yield the rows of a file of JSON Lines.

    A key that some records lack is a missing value; a key that all lack is an absent column.
    """
    # Quotes span no lines.
    config = replace(source.config, quote="", escape="")
    keys: dict[str, None] = {}
    rows = done = 0
    for block in read_blocks(file, config):
        parsed = json_lines.parse_json_block(block, [], config)
        keys |= dict.fromkeys(parsed.table.column_names)
        rows += parsed.table.num_rows
        yield parsed_rows(parsed, partition, wanted, done)
        done += parsed.read
    if rows:
        check_present(file, [*keys, *partition], wanted)


def parsed_rows(
    parsed: ParsedBlock, partition: Mapping[str, str | None], wanted: RequestedColumns, before: int
) -> TableBatch:
    for name in wanted.names:
        if name in parsed.nested:
            raise UserError(
                f"{parsed.file}: column {name!r} holds lists or objects, but the model takes it as "
                f"{wanted.types.get(name, 'text')}; expected values"
            )
    there, rows = set(parsed.table.column_names) - set(partition), len(parsed.lines)
    texts = {
        name: in_one(parsed.table[name])
        if name in there
        else pa.repeat(pa.scalar(partition.get(name), pa.string()), rows)
        for name in wanted.names
    }
    columns, unreadable = {}, dict[str, np.ndarray]()
    for name, kind in wanted.types.items():
        columns[name], unreadable[name] = wanted.number_format.convert(texts[name], kind)
    kept = {name: texts[name] for name in wanted.keep}
    lines_of_bad = np.array([row.line for row in parsed.bad], np.int64)
    numbers = before + 1 + np.arange(rows) + np.searchsorted(lines_of_bad, parsed.lines)
    origin = RowOrigin(parsed.file, parsed.lines, numbers, pa.RecordBatch.from_pydict(texts))
    batch = quarantine_rows(columns, kept, unreadable, origin, wanted)
    return replace(batch, read=parsed.read, bad=sorted(parsed.bad + batch.bad, key=line_of))


def line_of(row: BadRow) -> int:
    return row.line


# Selection of scorable rows


@dataclass(frozen=True)
class RowOrigin:
    """Origin of rows: file, line and number of every row (int64 ``[rows]``), and their values as stored."""

    file: str
    lines: np.ndarray
    numbers: np.ndarray
    stored: pa.RecordBatch


def quarantine_rows(
    columns: dict[str, pa.Array],
    kept: dict[str, pa.Array],
    unreadable: Mapping[str, np.ndarray],
    origin: RowOrigin,
    wanted: RequestedColumns,
) -> TableBatch:
    """Return a batch of typed ``columns`` and ``kept`` columns, with invalid rows quarantined.

    A row is invalid if a value is ``unreadable`` (bool ``[rows]`` per column), infinite or too large.
    """
    rows = len(origin.lines)
    reasons: dict[int, tuple[str, str]] = {}
    for name in sorted(unreadable):
        for row in np.flatnonzero(unreadable[name]).tolist():
            reasons.setdefault(row, (name, f"not {wanted.types[name]}"))
    for name, kind in wanted.types.items():
        if kind in value_types.NUMBERS:
            numbers = value_types.as_numbers(columns[name])
            for row in np.flatnonzero(np.abs(numbers) > LARGEST).tolist():
                reasons.setdefault(row, (name, "infinite" if np.isinf(numbers[row]) else "too large for float32"))
    columns = {name: wanted.spelled(column, name) for name, column in columns.items()}
    batch = pa.RecordBatch.from_pydict({**columns, **{KEPT + name: column for name, column in kept.items()}})
    if not reasons:
        return TableBatch(origin.file, rows, batch, origin.lines, origin.numbers, [])
    good = np.ones(rows, bool)
    good[list(reasons)] = False
    bad = [bad_row(origin, row, *reasons[row]) for row in sorted(reasons)]
    return TableBatch(origin.file, rows, batch.filter(pa.array(good)), origin.lines[good], origin.numbers[good], bad)


def bad_row(origin: RowOrigin, row: int, column: str, reason: str) -> BadRow:
    raw = value_types.as_python(origin.stored.column(column).slice(row, 1))[0]
    return BadRow(origin.file, int(origin.lines[row]), column, reason, "" if raw is None else str(raw))


# A file has one row, or several (arrays).
#: Name of scikit-learn's digits as a source.
DIGITS = "digits"


@dataclass(frozen=True)
class FileBatch:
    """Scorable rows, with every row's file and number in the file (from 1).

    ``content`` is uint8 ``[rows, channels, height, width]``, or texts. ``bad`` are quarantined rows; ``read`` counts
    all.
    """

    read: int
    files: list[str]
    numbers: list[int]
    content: np.ndarray | list[str]
    bad: list[BadRow]


def read_texts(files: Sequence[SourceFile], source: ResolvedSource) -> Iterator[FileBatch]:
    for start in range(0, len(files), BLOCK_FILES):
        block = files[start : start + BLOCK_FILES]
        texts = [read_text(file, source.config.encoding) for file in block]
        good = [(file.uri, text) for file, text in zip(block, texts, strict=True) if isinstance(text, str)]
        bad = [text for text in texts if isinstance(text, BadRow)]
        yield FileBatch(len(block), [uri for uri, _ in good], [1] * len(good), [text for _, text in good], bad)


def read_images(files: Sequence[SourceFile], source: ResolvedSource, shape: Shape) -> Iterator[FileBatch]:
    """Yield batches of images.

    Raises ``UserError`` for images whose shape is not the model's.
    """
    if source.format == "images":
        step = rows_at_once(shape)
        for start in range(0, len(files), step):
            block = tuple(files[start : start + step])
            yield from of_folder(FolderPart(block, (0,) * len(block), shape, source.config, "the model takes"))
        return
    arrays = [(array_part(file, shape), file.uri) for file in files] if source.format == "arrays" else []
    for part, name in arrays or [(DigitsPart(0), DIGITS)]:
        done = 0
        for chunk in part.chunks():
            rows = len(chunk.pixels)
            check_shape(name, chunk.pixels.shape[1:], shape)
            yield FileBatch(rows, [name] * rows, list(range(done + 1, done + rows + 1)), chunk.pixels, [])
            done += rows


def of_folder(part: FolderPart) -> Iterator[FileBatch]:
    for chunk in part.chunks():
        good = np.flatnonzero(chunk.good).tolist()
        yield FileBatch(
            part.rows, [part.files[row].uri for row in good], [1] * len(good), chunk.pixels[chunk.good], chunk.bad
        )


def array_part(file: SourceFile, shape: Shape) -> Part:
    array = open_array(file, "")
    check_shape(file.uri, array.shape, shape)
    return ArrayPart(file, array.images, np.zeros(len(array.labels), np.int32), array.channels_last)


def check_shape(name: str, found: tuple[int, ...], shape: Shape) -> None:
    if tuple(found) != tuple(shape):
        given = shape_text((found[0], found[1], found[2]))
        raise UserError(f"{name}: its images are {given}, and the model takes {shape_text(shape)}")
