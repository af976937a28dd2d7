"""Quarantined rows, stored with file, line, column and reason, up to a limit set by the user."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.errors import UserError

NAME = "quarantine.parquet"
RAW_CHARACTERS = 500
SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("line", pa.int64()),
        ("column", pa.string()),
        ("reason", pa.string()),
        ("raw", pa.string()),
    ]
)


@dataclass(frozen=True)
class BadRow:
    """One quarantined row; ``line`` counts from 1 and is the line of a text file or the row of a columnar file.

    ``column`` is empty if no single column is at fault. ``raw`` is the original row or value, cut if long.
    """

    file: str
    line: int
    column: str
    reason: str
    raw: str


def write_quarantine(writer: ArtifactWriter, rows: list[BadRow]) -> None:
    writer.write_bytes(NAME, to_parquet(rows))


def to_parquet(rows: list[BadRow]) -> bytes:
    columns = [asdict(row) | {"raw": row.raw[:RAW_CHARACTERS]} for row in rows]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(columns, SCHEMA), sink)
    return sink.getvalue().to_pybytes()


def read_quarantine(artifact: Artifact) -> list[BadRow]:
    table = pq.read_table(pa.BufferReader(artifact.read_bytes(NAME)))
    return [BadRow(**row) for row in table.to_pylist()]


def describe(row: BadRow) -> str:
    where = f" in column {row.column!r}" if row.column else ""
    return f"{row.file}, line {row.line:,}: {row.reason}{where} ({row.raw[:60]!r})"


def check_limit(rows: list[BadRow], read: int, limit: float) -> None:
    """Raise ``UserError`` with a summary if more than the share ``limit`` of the ``read`` rows is quarantined."""
    if len(rows) <= limit * read:
        return
    first: dict[tuple[str, str], BadRow] = {}
    for row in rows:
        first.setdefault((row.column, row.reason), row)
    reasons = Counter((row.column, row.reason) for row in rows).most_common(3)
    spelled = "; ".join(
        f"{count} x {reason}{f' in column {column!r}' if column else ''} (first in {first[column, reason].file}, "
        f"line {first[column, reason].line}: {first[column, reason].raw[:60]!r})"
        for (column, reason), count in reasons
    )
    raise UserError(
        f"data: {len(rows):,} of {read:,} rows ({len(rows) / read:.1%}) cannot be used, more than "
        f"data.quarantine_limit = {limit:g} allows: {spelled}; correct them or raise the limit"
    )
