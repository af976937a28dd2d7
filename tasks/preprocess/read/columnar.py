"""Columnar input (Parquet, Arrow IPC, and the spool that text is turned into), read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import UserError
from tasks.preprocess.memory import Budget
from tasks.preprocess.read.files import SourceFile

#: In the spool, the line of the user's file on which each row begins.
LINE = "\0line"
PAGE_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class Unit:
    """A piece of the input that is read by itself: a row group of Parquet or a record batch of Arrow.

    ``file`` is the user's file, ``uri`` where the columnar bytes lie, ``size`` and ``version`` what they were when they
    were listed. ``first_row`` counts over the whole input, ``first_line`` within the file, from 1.
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
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(source.uri, format, error) from None


def open_parquet(source: SourceFile, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        source.uri if source.local else source.open(),
        pre_buffer=False,
        buffer_size=PAGE_BUFFER_BYTES,
        page_checksum_verification=True,
        **options,
    )


def damaged(uri: str, format: str, error: Exception) -> UserError:
    return UserError(f"{uri}: not a whole {format.capitalize()} file, it is cut or damaged ({str(error)[:200]})")


def units_of(file: SourceFile, format: str, first_row: int = 0) -> tuple[pa.Schema, list[Unit]]:
    """The schema of a columnar file and its pieces."""
    reader = open_file(file, format)
    if format == "parquet":
        sizes = [reader.metadata.row_group(i).num_rows for i in range(reader.metadata.num_row_groups)]
        schema = reader.schema_arrow
    else:
        sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        schema = reader.schema
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
    pieces = [
        Unit(file.uri, file.uri, format, index, rows, first_row + start, 1 + start, file.size, file.version)
        for index, (rows, start) in enumerate(zip(sizes, starts, strict=False))
    ]
    return schema, pieces


def read(unit: Unit, names: list[str], budget: Budget) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Batches of as many rows as ``budget`` allows, with the columns ``names``, and the line of each row (int64)."""
    rows = budget.batch_rows(len(names))
    reader = open_file(unit.source, unit.format)
    done = 0
    try:
        if unit.format == "parquet":
            batches = row_group(reader, unit, names, rows, budget.whole_group_bytes)
        else:
            whole = reader.get_batch(unit.index)
            batches = (whole.slice(start, rows) for start in range(0, whole.num_rows, rows))
        for batch in batches:
            if LINE in batch.schema.names:
                lines = batch.column(LINE).to_numpy()
            else:
                lines = np.arange(unit.first_line + done, unit.first_line + done + batch.num_rows)
            done += batch.num_rows
            yield batch.select(names), lines
    except (pa.ArrowException, OSError) as error:
        raise damaged(unit.uri, unit.format, error) from None


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
