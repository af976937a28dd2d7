"""Columnar input (Parquet, Arrow IPC, and the spool that text is turned into), read piece by piece."""

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

from slipstream.errors import UserError
from slipstream.source.columns import value_types
from slipstream.source.columns.identity import hash_values
from slipstream.source.files import SourceFile, cannot_be_read, format_inside
from slipstream.source.foreign import MOST_BEGINNING, by_beginning
from slipstream.source.memory import Budget
from slipstream.source.quarantine import BadRow

#: In the spool, the line of the user's file on which each row begins.
LINE = "\0line"
#: In the spool, the hash of the column that alone decides the split of a row, of the text as it was written.
IDENTITY = "\0identity"
PAGE_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class Unit:
    """A piece of the input that is read by itself: a row group of Parquet or a record batch of Arrow.

    ``file`` is the user's file, ``uri`` where the columnar bytes lie, ``size`` and ``version`` what they were when they
    were listed. ``first_row`` counts over the whole input, ``first_line`` within the file, from 1. ``partition`` are
    the columns that the directory of the file gives, each with its value (a text, ``None`` for missing) in all rows.
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
        """Whether it was text, of which the columnar bytes lie in a spool."""
        return self.uri != self.file

    def moved(self, address: Callable[[str], str]) -> Unit:
        """The same unit; one in a spool lies at the ``address`` of where it lay."""
        return replace(self, uri=address(self.uri)) if self.spooled else self

    @property
    def source(self) -> SourceFile:
        """The file to read."""
        return SourceFile(self.uri, self.size, self.version)


@dataclass(frozen=True)
class TableInput:
    """A table, ready to be read. ``types`` are by column, in the order of the file; ``read`` counts all records."""

    units: list[Unit]
    types: dict[str, str]
    read: int
    bad: list[BadRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)


class ParquetFile:
    """An open file, of which each row group is a unit. Damage raises what :func:`damage_named` takes."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._file = open_parquet(source)
        self.schema = self._file.schema_arrow

    def sizes(self) -> list[int]:
        """The rows of each unit."""
        metadata = self._file.metadata
        return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]

    def batches(self, index: int, names: list[str], rows: int, budget: Budget) -> Iterator[pa.RecordBatch]:
        """A unit in batches of at most ``rows``: decoded column by column if it is not too large, else all columns side
        by side. There each holds on to its pages, for many columns more than a whole ordinary row group."""
        metadata = self._file.metadata
        if metadata.row_group(index).total_byte_size > budget.whole_group_bytes:
            yield from self._file.iter_batches(rows, row_groups=[index], columns=names, use_threads=False)
            return
        # Texts as the codes and dictionaries that Parquet stores: each text is read once.
        texts = [column.name for column in self.schema if pa.types.is_string(column.type)]
        file = open_parquet(self._source, metadata, texts) if texts else self._file
        columns = {name: file.read_row_group(index, columns=[name], use_threads=False).column(name) for name in names}
        yield from pa.table(columns).to_batches(max_chunksize=rows)

    def head(self, index: int, names: list[str], rows: int) -> pa.RecordBatch:
        """The first rows of a unit."""
        batch = next(self._file.iter_batches(rows, row_groups=[index], columns=names, use_threads=False), None)
        if batch is None:
            raise ValueError(f"row group {index} has no rows")
        return batch


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
    )


class ArrowFile:
    """As :class:`ParquetFile`, of record batches.

    They are read, not mapped: whoever touches a page of a mapping behind the end of a file that was cut meanwhile dies
    of a bus error (SIGBUS). Only what is asked for is read.
    """

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._stream = pa.OSFile(source.uri) if source.local else source.open()
        self._file = pa.ipc.open_file(self._stream)
        self.schema = self._file.schema

    def _only(self, names: list[str]) -> pa.ipc.RecordBatchFileReader:
        """The file with these columns and, if it is a spool, its lines, in the order of the file."""
        fields = [index for index, field in enumerate(self.schema) if field.name in (*names, LINE)]
        return pa.ipc.open_file(self._stream, options=pa.ipc.IpcReadOptions(included_fields=fields))

    def sizes(self) -> list[int]:
        count = self._file.num_record_batches
        file = self._only([min(self.schema, key=width_of).name]) if len(self.schema) else self._file
        return [file.get_batch(index).num_rows for index in range(count)]

    def batches(self, index: int, names: list[str], rows: int, budget: Budget) -> Iterator[pa.RecordBatch]:
        size = Path(self._source.uri).stat().st_size if self._source.local else 0
        if size > budget.whole_group_bytes * self._file.num_record_batches:
            return self._of_large(index, names, rows, size)
        whole = self._only(names).get_batch(index)
        return (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))

    def _of_large(self, index: int, names: list[str], rows: int, size: int) -> Iterator[pa.RecordBatch]:
        """Of a batch that need not fit into memory, which Arrow reads as a whole or maps. Each slice is copied at once,
        if the file still has its ``size``: it can be cut unnoticed only during the milliseconds that this takes."""
        with pa.memory_map(self._source.uri) as mapping:
            whole = pa.ipc.open_file(mapping).get_batch(index)
            whole = whole.select([*names, *({LINE} & {*whole.schema.names})])
            for start in range(0, whole.num_rows, rows):
                if Path(self._source.uri).stat().st_size != size:
                    raise ValueError(f"expected {size:,} bytes")
                yield copied(whole.slice(start, rows))

    def head(self, index: int, names: list[str], rows: int) -> pa.RecordBatch:
        return self._only(names).get_batch(index).slice(0, rows)


def width_of(field: pa.Field) -> int:
    """The bits of a value, of texts and nested values the most: what is read of a column to learn its length."""
    try:
        return field.type.bit_width
    except ValueError:
        return sys.maxsize


def copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same values in memory of their own, as :func:`.value_types.simplified` gives them."""
    columns = {name: value_types.simplified(batch.column(name)) for name in batch.schema.names}
    simple, sink = pa.RecordBatch.from_pydict(columns), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, simple.schema) as writer:
        writer.write_batch(simple)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def open_file(source: SourceFile, format: str) -> ParquetFile | ArrowFile:
    return ParquetFile(source) if format == "parquet" else ArrowFile(source)


@contextmanager
def damage_named(uri: str, format: str) -> Iterator[None]:
    """Raise ``UserError`` for what is raised while a damaged file is read."""
    try:
        yield
    except UserError:
        raise  # a ``ValueError`` too: the store's word on what the user has to mend
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(uri, format, error) from None


def damaged(uri: str, format: str, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno:
        return cannot_be_read(uri, error)
    return UserError(f"{uri}: not a whole {format.capitalize()} file, it is cut or damaged ({str(error)[:200]})")


def units_of(file: SourceFile, format: str, first_row: int = 0) -> tuple[pa.Schema, list[Unit]]:
    """The schema of a columnar file and its pieces. Raises ``UserError`` if the file is damaged or something else."""
    with damage_named(file.uri, format):
        try:
            reader = open_file(file, format)
        except pa.ArrowInvalid:
            with file.open() as stream:
                foreign = by_beginning(stream.read(MOST_BEGINNING))
            if foreign and format_inside(file) != format:
                raise UserError(f"{file.uri}: {foreign}") from None
            raise
        sizes, schema = reader.sizes(), reader.schema
        for column in schema:  # names and types that cannot be decoded, or are not what they should be, are damage
            value_types.type_of(column.type)
            str(column.name)
    starts = accumulate(sizes, initial=0)
    pieces = [
        Unit(file.uri, file.uri, format, index, rows, first_row + start, 1 + start, file.size, file.version)
        for index, (rows, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    return schema, pieces


def read(unit: Unit, names: list[str], budget: Budget) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Batches of as many rows as ``budget`` allows, with the columns ``names``, and the line of each row (int64). The
    hashes ``IDENTITY`` follow if they are stored.

    Columns are as :func:`.value_types.simplified` gives them. Raises ``UserError`` for damage, for texts that are not
    UTF-8, and for a column that says something else than the directory of the file.
    """
    rows = budget.batch_rows(len(names))
    with damage_named(unit.uri, unit.format):
        reader = open_file(unit.source, unit.format)
        types = dict(zip(reader.schema.names, reader.schema.types, strict=True))
        names = [*names, IDENTITY] if IDENTITY in types else names
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
    """Batches without columns."""
    for start in range(0, total, rows):
        yield pa.RecordBatch.from_struct_array(pa.array([{}] * min(rows, total - start), pa.struct([])))


def head(unit: Unit, names: list[str], rows: int) -> pa.RecordBatch:
    """At most ``rows`` rows from the beginning, of columns that are stored, without decoding all the others."""
    with damage_named(unit.uri, unit.format):
        batch = open_file(unit.source, unit.format).head(unit.index, names, rows)
    check_texts(batch, names, unit)
    kinds = dict(zip(batch.schema.names, batch.schema.types, strict=True))
    return assembled(batch, names, kinds, replace(unit, partition={}))


def assembled(batch: pa.RecordBatch, names: list[str], kinds: dict[str, pa.DataType], unit: Unit) -> pa.RecordBatch:
    """The columns ``names``, of which those in ``kinds`` are in the file, and the others in the unit's partition."""
    columns = {}
    for name in names:
        if name not in kinds:
            columns[name] = pa.array([unit.partition[name]], pa.string()).take(pa.array(np.zeros(batch.num_rows, int)))
        elif value_types.has_values(kinds[name]):
            columns[name] = value_types.simplified(batch.column(name))
        else:
            columns[name] = pa.nulls(batch.num_rows, pa.binary())
        if name in kinds and name in unit.partition:
            check_partition(columns[name], name, unit)
    return pa.RecordBatch.from_pydict(columns)


def check_texts(batch: pa.RecordBatch, names: list[str], unit: Unit) -> None:
    """Raise ``UserError`` if texts are not UTF-8, as a careless writer may leave them, or are codes of none."""
    for name in names:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            check_codes(column, unit)
        texts = column.dictionary if pa.types.is_dictionary(column.type) else column
        if value_types.type_of(texts.type) != value_types.TEXT:
            continue
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            raise UserError(
                f"{unit.file}: column {name!r} has texts that are not UTF-8; expected a file whose writer encodes them "
                "so, or the column left out with data.drop"
            ) from None


def check_codes(column: pa.DictionaryArray, unit: Unit) -> None:
    """Raise ``UserError`` if a code has no place in the dictionary."""
    codes = pc.min_max(column.indices)
    low, high = codes["min"].as_py(), codes["max"].as_py()
    if low is not None and not 0 <= low <= high < len(column.dictionary):
        raise damaged(unit.uri, unit.format, ValueError(f"codes {low} to {high} of {len(column.dictionary)} values"))


def check_partition(column: pa.Array, name: str, unit: Unit) -> None:
    """Raise ``UserError`` unless all values of a stored column are the one that the directory of the file says."""
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
