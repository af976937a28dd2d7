"""Columnar input (Parquet, Arrow IPC, and the spool that text is turned into), read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slipstream.errors import UserError
from slipstream.prepare.columns import value_types
from slipstream.prepare.columns.hashing import hash_values
from slipstream.prepare.memory import Budget
from slipstream.prepare.source.files import SourceFile, cannot_be_read

#: In the spool, the line of the user's file on which each row begins.
LINE = "\0line"
PAGE_BUFFER_BYTES = 1 << 16
#: What is raised while a damaged file is read, besides ``UserError``, which is a ``ValueError`` too.
BROKEN = (pa.ArrowException, OSError, ValueError)


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
    def source(self) -> SourceFile:
        """The file to read."""
        return SourceFile(self.uri, self.size, self.version)


def open_file(source: SourceFile, format: str) -> Any:
    """A ``ParquetFile`` or an IPC reader. Raises ``UserError`` if the file is damaged or something else."""
    try:
        if format == "parquet":
            return open_parquet(source)
        return pa.ipc.open_file(pa.memory_map(source.uri) if source.local else source.open())
    except UserError:
        raise  # the store's word on what the user has to mend
    except BROKEN as error:
        raise damaged(source.uri, format, error) from None


def open_parquet(source: SourceFile, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        source.uri if source.local else source.open(),
        pre_buffer=False,
        buffer_size=PAGE_BUFFER_BYTES,
        page_checksum_verification=True,
        **options,
    )


def check_schema(schema: pa.Schema) -> None:
    """Raise one of ``BROKEN`` for names and types that cannot be decoded or that are not what they should be."""
    for column in schema:
        value_types.type_of(column.type)
        str(column.name)


def damaged(uri: str, format: str, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno:
        return cannot_be_read(uri, error)
    return UserError(f"{uri}: not a whole {format.capitalize()} file, it is cut or damaged ({str(error)[:200]})")


def units_of(file: SourceFile, format: str, first_row: int = 0) -> tuple[pa.Schema, list[Unit]]:
    """The schema of a columnar file and its pieces."""
    reader = open_file(file, format)
    try:
        if format == "parquet":
            sizes = [reader.metadata.row_group(i).num_rows for i in range(reader.metadata.num_row_groups)]
            schema = reader.schema_arrow
        else:
            sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
            schema = reader.schema
        check_schema(schema)
    except UserError:
        raise  # of the store
    except BROKEN as error:
        raise damaged(file.uri, format, error) from None
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
    pieces = [
        Unit(file.uri, file.uri, format, index, rows, first_row + start, 1 + start, file.size, file.version)
        for index, (rows, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    return schema, pieces


def read(unit: Unit, names: list[str], budget: Budget) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Batches of as many rows as ``budget`` allows, with the columns ``names``, and the line of each row (int64).

    Columns are as :func:`.value_types.simplified` gives them. Raises ``UserError`` for damage, for texts that are not
    UTF-8, and for a column that says something else than the directory of the file.
    """
    rows = budget.batch_rows(len(names))
    reader = open_file(unit.source, unit.format)
    schema = reader.schema_arrow if unit.format == "parquet" else reader.schema
    found = dict(zip(schema.names, schema.types, strict=True))
    kinds = {name: found[name] for name in names if name in found}
    stored = [name for name, kind in kinds.items() if value_types.has_values(kind)]
    as_stored = stored == names and not unit.partition and all(map(value_types.is_simple, kinds.values()))
    done = 0
    batches: Iterator[pa.RecordBatch]
    try:
        if not stored:
            batches = (
                pa.RecordBatch.from_struct_array(pa.array([{}] * min(rows, unit.rows - start), pa.struct([])))
                for start in range(0, unit.rows, rows)
            )
        elif unit.format == "parquet":
            batches = row_group(reader, unit, stored, rows, budget.whole_group_bytes)
        else:
            whole = reader.get_batch(unit.index)
            batches = (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))
        for batch in batches:
            if LINE in batch.schema.names:
                lines = batch.column(LINE).to_numpy()
            else:
                lines = np.arange(unit.first_line + done, unit.first_line + done + batch.num_rows)
            done += batch.num_rows
            if unit.uri == unit.file:
                check_texts(batch, stored, unit)
            yield batch.select(names) if as_stored else assembled(batch, names, kinds, unit), lines
    except UserError:
        raise
    except BROKEN as error:
        raise damaged(unit.uri, unit.format, error) from None


def head(unit: Unit, names: list[str], rows: int) -> pa.RecordBatch:
    """At most ``rows`` rows from the beginning, of columns that are stored, without decoding all the others."""
    reader = open_file(unit.source, unit.format)
    try:
        if unit.format == "parquet":
            batch = next(reader.iter_batches(rows, row_groups=[unit.index], columns=names, use_threads=False), None)
            if batch is None:
                raise ValueError(f"row group {unit.index} has no rows")
        else:
            batch = reader.get_batch(unit.index).slice(0, rows)
    except UserError:
        raise
    except BROKEN as error:
        raise damaged(unit.uri, unit.format, error) from None
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
    said = pa.array([unit.partition[name]], pa.string())
    kind = value_types.type_of(column.type)
    meant = said if kind == value_types.TEXT else value_types.convert(said, kind, [])[0]
    differs = np.flatnonzero(hash_values(column) != hash_values(meant)[0])
    if len(differs):
        found = value_types.as_python(column.take(pa.array(differs[:1])))[0]
        raise UserError(
            f"{unit.file}: the column {name!r} holds {found!r}, but the directory says {name}="
            f"{unit.partition[name]}; expected the same in both, or other directory names"
        )


def row_group(
    reader: pq.ParquetFile, unit: Unit, names: list[str], rows: int, whole_bytes: int
) -> Iterator[pa.RecordBatch]:
    """A row group in batches: decoded column by column up to ``whole_bytes``, else all columns side by side.

    Side by side each column holds on to its pages, which for many columns is more than a whole ordinary row group.
    """
    if reader.metadata.row_group(unit.index).total_byte_size > whole_bytes:
        yield from reader.iter_batches(rows, row_groups=[unit.index], columns=names, use_threads=False)
        return
    reader = with_dictionaries(reader, unit)
    columns = {
        name: reader.read_row_group(unit.index, columns=[name], use_threads=False).column(name) for name in names
    }
    yield from pa.table(columns).to_batches(max_chunksize=rows)


def with_dictionaries(reader: pq.ParquetFile, unit: Unit) -> pq.ParquetFile:
    """A reader that leaves texts as the codes and dictionaries that Parquet stores: each text is read once."""
    texts = [field.name for field in reader.schema_arrow if pa.types.is_string(field.type)]
    return open_parquet(unit.source, metadata=reader.metadata, read_dictionary=texts) if texts else reader


def write_spool(path: Path, batch: pa.RecordBatch) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
