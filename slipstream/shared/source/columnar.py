"""Columnar input (Parquet, Arrow IPC, and text files converted to Arrow), read unit by unit.

The *spool* is the directory of Arrow files into which text files are converted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream.shared.errors import UserError
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import hash_values
from slipstream.shared.source.files import SourceFile, cannot_be_read, format_inside
from slipstream.shared.source.memory import MemoryBudget
from slipstream.shared.source.quarantine import QuarantinedRows
from slipstream.shared.source.unsupported_formats import MOST_BEGINNING, unsupported_beginning

#: Column of a spool file: line of the user's file on which the row starts.
LINE = "\0line"
#: Start of the name of a spool file's column with the hashes of ``data.group`` or ``data.id``, of the original texts.
IDENTITY = "\0identity"
PAGE_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class Unit:
    """Independently readable unit of input: a Parquet row group or an Arrow record batch.

    ``file`` is the user's file. ``uri`` is the Parquet or Arrow file to read, of the listed ``size`` and ``version``.
    ``first_row`` counts over the whole input, ``first_line`` within the file, from 1. ``partition`` maps columns given
    by the file's directory, such as ``year=2020``, to their text (``None`` if missing), equal for all rows.
    """

    file: str
    uri: str
    format: str
    index: int
    rows: int
    first_row: int
    first_line: int
    size: int = 0
    version: str = ""
    partition: dict[str, str | None] = field(default_factory=dict)

    @property
    def spooled(self) -> bool:
        """True if the unit was converted from text, so ``uri`` is in the spool."""
        return self.uri != self.file

    def moved(self, address: Callable[[str], str]) -> Unit:
        """Return the unit with the new address ``address(uri)`` if it is in a spool, else unchanged."""
        return replace(self, uri=address(self.uri)) if self.spooled else self

    @property
    def source(self) -> SourceFile:
        return SourceFile(self.uri, self.size, self.version)


@dataclass(frozen=True)
class TableInput:
    """Opened table: its units, ``types`` by column in file order, and bad rows; ``read`` counts all records.

    ``indices`` are columns that only number the rows and are not read.
    """

    units: list[Unit]
    types: dict[str, str]
    read: int
    bad: QuarantinedRows = field(default_factory=QuarantinedRows)
    warnings: list[str] = field(default_factory=list)
    indices: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)


class ParquetFile:
    """Open Parquet file with one unit per row group; wrap its use in :func:`damage_named`."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._file = open_parquet(source)
        self.schema = self._file.schema_arrow

    def sizes(self) -> list[int]:
        metadata = self._file.metadata
        return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]

    def batches(self, index: int, names: list[str], rows: int, budget: MemoryBudget) -> Iterator[pa.RecordBatch]:
        """Yield a unit in batches of at most ``rows`` rows, decoded column by column unless the unit is too large.

        A unit above ``budget.whole_group_bytes`` is streamed with all columns in parallel.
        """
        metadata = self._file.metadata
        if metadata.row_group(index).total_byte_size > budget.whole_group_bytes:
            yield from self._file.iter_batches(rows, row_groups=[index], columns=names, use_threads=False)
            return
        # Texts keep the codes and dictionaries of Parquet, so every distinct text is read once.
        texts = [column.name for column in self.schema if pa.types.is_string(column.type)]
        file = open_parquet(self._source, metadata, texts) if texts else self._file
        columns = {name: file.read_row_group(index, columns=[name], use_threads=False).column(name) for name in names}
        yield from pa.table(columns).to_batches(max_chunksize=rows)


def open_parquet(
    source: SourceFile, metadata: pq.FileMetaData | None = None, read_dictionary: list[str] | None = None
) -> pq.ParquetFile:
    return pq.ParquetFile(
        source.uri if source.local else source.open(),
        metadata=metadata,
        read_dictionary=read_dictionary,
        pre_buffer=False,
        buffer_size=PAGE_BUFFER_BYTES,
        page_checksum_verification=True,
        coerce_int96_timestamp_unit="us",
    )


class ArrowFile:
    """Open Arrow file with one unit per record batch and the methods of :class:`ParquetFile`.

    Batches are read, not memory-mapped: a mapped page beyond the end of a truncated file kills the process with SIGBUS.
    Only requested columns are read.
    """

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._stream = pa.OSFile(source.uri) if source.local else source.open()
        self._file = pa.ipc.open_file(self._stream)
        self.schema = self._file.schema

    def _only(self, names: list[str]) -> pa.ipc.RecordBatchFileReader:
        """Return a reader of the columns ``names`` and, in a spool, ``LINE``, in file order."""
        fields = [index for index, field in enumerate(self.schema) if field.name in (*names, LINE)]
        return pa.ipc.open_file(self._stream, options=pa.ipc.IpcReadOptions(included_fields=fields))

    def sizes(self) -> list[int]:
        count = self._file.num_record_batches
        file = self._only([min(self.schema, key=width_of).name]) if len(self.schema) else self._file
        return [file.get_batch(index).num_rows for index in range(count)]

    def batches(self, index: int, names: list[str], rows: int, budget: MemoryBudget) -> Iterator[pa.RecordBatch]:
        size = Path(self._source.uri).stat().st_size if self._source.local else 0
        if size > budget.whole_group_bytes * self._file.num_record_batches:
            return self._of_large(index, names, rows, size)
        whole = self._only(names).get_batch(index)
        return (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))

    def _of_large(self, index: int, names: list[str], rows: int, size: int) -> Iterator[pa.RecordBatch]:
        """Yield a unit in batches that are copied from a memory map.

        Every slice is copied right after a check of the file's ``size``, so only a truncation in between can kill the
        process.
        """
        with pa.memory_map(self._source.uri) as mapping:
            whole = pa.ipc.open_file(mapping).get_batch(index)
            whole = whole.select([*names, *({LINE} & {*whole.schema.names})])
            for start in range(0, whole.num_rows, rows):
                if Path(self._source.uri).stat().st_size != size:
                    raise ValueError(f"expected {size:,} bytes")
                yield copy_batch(whole.slice(start, rows))


def width_of(field: pa.Field) -> int:
    """Return the bits per value of a column, or ``sys.maxsize`` for texts and nested values."""
    try:
        return field.type.bit_width
    except ValueError:
        return sys.maxsize


def copy_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy a batch out of a memory map, with columns simplified by :func:`.value_types.simplify_column`."""
    columns = {name: value_types.simplify_column(batch.column(name)) for name in batch.schema.names}
    simple, sink = pa.RecordBatch.from_pydict(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, simple.schema) as writer:
        writer.write_batch(simple)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def open_file(source: SourceFile, format: str) -> ParquetFile | ArrowFile:
    return ParquetFile(source) if format == "parquet" else ArrowFile(source)


@contextmanager
def damage_named(uri: str, format: str) -> Iterator[None]:
    """Convert errors of reading a damaged file to a ``UserError`` that names it."""
    try:
        yield
    except UserError:
        raise  # a ``ValueError`` too, but already a message of the store to the user
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged_error(uri, format, error) from None


def damaged_error(uri: str, format: str, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno:
        return cannot_be_read(uri, error)
    return UserError(
        f"{uri}: not a complete {format.capitalize()} file: it is truncated or damaged ({str(error)[:200]})"
    )


def list_units(file: SourceFile, format: str, first_row: int = 0) -> tuple[pa.Schema, list[Unit]]:
    """Return the schema and units of a columnar file; raise ``UserError`` if it is damaged or of another format."""
    with damage_named(file.uri, format):
        try:
            reader = open_file(file, format)
        except pa.ArrowInvalid:
            with file.open() as stream:
                unsupported = unsupported_beginning(stream.read(MOST_BEGINNING))
            if unsupported and format_inside(file) != format:
                raise UserError(f"{file.uri}: {unsupported}") from None
            raise
        sizes, schema = reader.sizes(), reader.schema
        for column in schema:  # names or types that cannot be decoded or are invalid mean damage
            value_types.column_type(column.type)
            str(column.name)
    starts = accumulate(sizes, initial=0)
    pieces = [
        Unit(file.uri, file.uri, format, index, rows, first_row + start, 1 + start, file.size, file.version)
        for index, (rows, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    return schema, pieces


def read_unit(unit: Unit, names: list[str], budget: MemoryBudget) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Yield a unit's columns ``names`` in batches sized by ``budget``, with the line of every row (int64).

    A batch ends with the columns of ``IDENTITY`` in the file. Columns are simplified by
    :func:`.value_types.simplify_column`. Raise ``UserError`` for damage, for texts that are not UTF-8, and for a column
    that contradicts the file's directory.
    """
    rows = budget.batch_rows(len(names))
    with damage_named(unit.uri, unit.format):
        reader = open_file(unit.source, unit.format)
        types = dict(zip(reader.schema.names, reader.schema.types, strict=True))
        names = [*names, *(name for name in types if name.startswith(IDENTITY))]
        kinds = {name: types[name] for name in names if name in types}
        stored = [name for name, kind in kinds.items() if value_types.has_values(kind)]
        as_stored = stored == names and not unit.partition and all(map(value_types.is_simple, kinds.values()))
        batches = reader.batches(unit.index, stored, rows, budget) if stored else empty_batches(unit.rows, rows)
        done = 0
        for batch in batches:
            if LINE in batch.schema.names:
                lines = batch.column(LINE).to_numpy()
            else:
                lines = np.arange(unit.first_line + done, unit.first_line + done + batch.num_rows)
            done += batch.num_rows
            if not unit.spooled:
                check_texts(batch, stored, unit)
            yield batch.select(names) if as_stored else assembled(batch, names, kinds, unit), lines


def empty_batches(total: int, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, total, rows):
        yield pa.RecordBatch.from_struct_array(pa.array([{}] * min(rows, total - start), pa.struct([])))


def assembled(batch: pa.RecordBatch, names: list[str], kinds: dict[str, pa.DataType], unit: Unit) -> pa.RecordBatch:
    """Return the columns ``names``: from ``batch`` if they are in ``kinds``, else from the unit's partition."""
    columns = {}
    for name in names:
        if name not in kinds:
            columns[name] = pa.array([unit.partition[name]], pa.string()).take(pa.array(np.zeros(batch.num_rows, int)))
        elif value_types.has_values(kinds[name]):
            columns[name] = value_types.simplify_column(batch.column(name))
        else:
            columns[name] = pa.nulls(batch.num_rows, pa.binary())
        if name in kinds and name in unit.partition:
            check_partition(columns[name], name, unit)
    return pa.RecordBatch.from_pydict(columns)


def check_texts(batch: pa.RecordBatch, names: list[str], unit: Unit) -> None:
    """Raise ``UserError`` for texts that are not UTF-8 (some writers do not check) or dictionary codes out of range."""
    for name in names:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            check_codes(column, unit)
        texts = column.dictionary if pa.types.is_dictionary(column.type) else column
        if value_types.column_type(texts.type) != value_types.TEXT:
            continue
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            raise UserError(
                f"{unit.file}: column {name!r} has text that is not UTF-8; write the file with UTF-8 text, or drop "
                "the column with data.drop"
            ) from None


def check_codes(column: pa.DictionaryArray, unit: Unit) -> None:
    codes = pc.min_max(column.indices)
    low, high = codes["min"].as_py(), codes["max"].as_py()
    if low is not None and not 0 <= low <= high < len(column.dictionary):
        raise damaged_error(
            unit.uri, unit.format, ValueError(f"codes {low} to {high} of {len(column.dictionary)} values")
        )


def check_partition(column: pa.Array, name: str, unit: Unit) -> None:
    """Raise ``UserError`` unless all values of a stored column equal the value in the directory's name."""
    expected = pa.array([unit.partition[name]], pa.string())
    differs = np.flatnonzero(hash_values(column, exact=True) != hash_values(expected, exact=True)[0])
    if len(differs):
        other = value_types.as_python(column.take(pa.array(differs[:1])))[0]
        raise UserError(
            f"{unit.file}: the column {name!r} holds {other!r}, but the directory says {name}="
            f"{unit.partition[name]}; expected the same in both, or other directory names"
        )


def write_spool(path: Path, batch: pa.RecordBatch) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
