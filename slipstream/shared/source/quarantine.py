"""Quarantined rows, stored with file, line, column and reason, up to a limit set by the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.errors import UserError

NAME = "quarantine.parquet"
RAW_CHARACTERS = 500
#: Rows per batch of a spool, and per row group of the Parquet file.
SPOOLED, ROW_GROUP = 1 << 12, 1 << 14
#: Number of first rows that are kept in memory, and largest number of different reasons that are counted.
FIRST, MOST_REASONS = 3, 1000
OTHER = "other reasons"
#: Number of quarantined rows from which preparation ends as soon as the limit is certain to be exceeded. With fewer,
#: the message has all counts.
ENOUGH_TO_END = 100_000
SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("line", pa.int64()),
        ("column", pa.string()),
        ("reason", pa.string()),
        ("raw", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class BadRow:
    """One quarantined row; ``line`` counts from 1 and is the line of a text file or the row of a columnar file.

    ``column`` is empty if no single column is at fault. ``raw`` is the original row or value, cut if long.
    """

    file: str
    line: int
    column: str
    reason: str
    raw: str


@dataclass
class ReasonCount:
    rows: int
    first: BadRow


@dataclass(frozen=True)
class QuarantinedRows:
    """Quarantined rows in file order; iteration reads them from ``spools``."""

    reasons: list[ReasonCount] = field(default_factory=list)
    first: list[BadRow] = field(default_factory=list)
    spools: list[Path] = field(default_factory=list)

    @classmethod
    def counted(cls, rows: Iterable[BadRow]) -> QuarantinedRows:
        first: list[BadRow] = []
        return cls(count_reasons((row, 1) for row in first_noted(rows, first)), first)

    @classmethod
    def spooled(cls, rows: Iterable[BadRow], path: Path) -> QuarantinedRows:
        found = cls.counted(written(rows, path))
        return replace(found, spools=[path] if found.reasons else [])

    def __len__(self) -> int:
        return sum(each.rows for each in self.reasons)

    def __iter__(self) -> Iterator[BadRow]:
        for path in self.spools:
            with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as spool:
                for index in range(spool.num_record_batches):
                    yield from (BadRow(**row) for row in spool.get_batch(index).to_pylist())

    def __add__(self, other: QuarantinedRows) -> QuarantinedRows:
        return QuarantinedRows.joined([self, other])

    @classmethod
    def joined(cls, parts: Sequence[QuarantinedRows]) -> QuarantinedRows:
        reasons = count_reasons((each.first, each.rows) for part in parts for each in part.reasons)
        first = [row for part in parts for row in part.first][:FIRST]
        return cls(reasons, first, [path for part in parts for path in part.spools])

    def moved(self, address: Callable[[int, Path], Path]) -> QuarantinedRows:
        return replace(self, spools=[address(*each) for each in enumerate(self.spools)])


def count_reasons(found: Iterable[tuple[BadRow, int]]) -> list[ReasonCount]:
    # Every pair is a row and the number of rows with its reason.
    counts: dict[tuple[str, str], ReasonCount] = {}
    for row, rows in found:
        why = row.column, row.reason
        if why not in counts and len(counts) >= MOST_REASONS:
            why, row = ("", OTHER), replace(row, column="", reason=OTHER)
        counts.setdefault(why, ReasonCount(0, row)).rows += rows
    return list(counts.values())


def first_noted(rows: Iterable[BadRow], first: list[BadRow]) -> Iterator[BadRow]:
    for row in rows:
        kept = replace(row, raw=row.raw[:RAW_CHARACTERS]) if len(row.raw) > RAW_CHARACTERS else row
        if len(first) < FIRST:
            first.append(kept)
        yield kept


def written(rows: Iterable[BadRow], path: Path) -> Iterator[BadRow]:
    remaining = iter(rows)
    batch = list(islice(remaining, SPOOLED))
    if not batch:
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as spool:
        while batch:
            spool.write_table(rows_table(batch))
            yield from batch
            batch = list(islice(remaining, SPOOLED))


def rows_table(rows: list[BadRow]) -> pa.Table:
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    columns["raw"] = [raw[:RAW_CHARACTERS] for raw in columns["raw"]]
    return pa.Table.from_pydict(columns, SCHEMA)


def write_quarantine(writer: ArtifactWriter, rows: Iterable[BadRow]) -> None:
    write_parquet(writer.directory / NAME, rows)
    writer.add(NAME)


def to_parquet(rows: Iterable[BadRow]) -> bytes:
    sink = pa.BufferOutputStream()
    write_parquet(sink, rows)
    return sink.getvalue().to_pybytes()


def write_parquet(sink: Path | pa.NativeFile, rows: Iterable[BadRow]) -> None:
    """Write the rows as Parquet. Row groups are cut at the same rows however the rows were spooled."""
    remaining = iter(rows)
    with pq.ParquetWriter(sink, SCHEMA) as file:
        batch = list(islice(remaining, ROW_GROUP))
        while True:
            file.write_table(rows_table(batch))
            batch = list(islice(remaining, ROW_GROUP))
            if not batch:
                return


def read_quarantine(artifact: Artifact) -> Iterator[BadRow]:
    return read_parquet(pa.BufferReader(artifact.read_bytes(NAME)))


def read_parquet(source: BinaryIO | pa.NativeFile) -> Iterator[BadRow]:
    with pq.ParquetFile(source) as file:
        for batch in file.iter_batches(SPOOLED):
            yield from (BadRow(**row) for row in batch.to_pylist())


def describe(row: BadRow) -> str:
    where = f" in column {row.column!r}" if row.column else ""
    return f"{row.file}, line {row.line:,}: {row.reason}{where} ({row.raw[:60]!r})"


def check_limit(bad: QuarantinedRows | Iterable[BadRow], read: int, limit: float, *, certain: bool = False) -> None:
    """Raise ``UserError`` with a summary if more than the share ``limit`` of the ``read`` rows is quarantined.

    With ``certain``, more rows may follow, and ``read`` is the largest number that the data can have.
    """
    found = bad if isinstance(bad, QuarantinedRows) else QuarantinedRows.counted(bad)
    count = len(found)
    if count <= limit * read or (certain and count < ENOUGH_TO_END):
        return
    spelled = "; ".join(
        f"{each.rows} x {each.first.reason}{f' in column {each.first.column!r}' if each.first.column else ''} (first "
        f"in {each.first.file}, line {each.first.line}: {each.first.raw[:60]!r})"
        for each in sorted(found.reasons, key=lambda each: -each.rows)[:FIRST]
    )
    least = "at least " if certain else ""
    raise UserError(
        f"data: {least}{count:,} of {read:,} rows ({count / read:.1%}) cannot be used, more than "
        f"data.quarantine_limit = {limit:g} allows: {spelled}; correct them or raise the limit"
    )
