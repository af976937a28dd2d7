"""Text tables (CSV, JSON Lines), converted to Arrow block by block.

A sample suggests the types. All values decide them: a column that a block cannot hold in its final type is read again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.source import quarantine
from slipstream.shared.source.columnar import IDENTITY, LINE, TableInput, Unit, write_spool
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import MISSING, hash_identities
from slipstream.shared.source.columns.number_formats import DECLARED, NumberFormat
from slipstream.shared.source.columns.readings import (
    Readings,
    count_readings,
    decide_type,
    is_counted,
    read_as,
    tolerated_share,
    total_readings,
)
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow, QuarantinedRows
from slipstream.shared.source.resolved import ResolvedSource
from slipstream.shared.source.tables import (
    Partitions,
    check_columns,
    check_names,
    decide_types,
    find_indices,
    find_partitions,
)
from slipstream.shared.source.text import csv_blocks, json_lines
from slipstream.shared.source.text.csv_blocks import ParsedBlock, TextBlock, read_blocks, read_header
from slipstream.shared.source.text.delimiters import detect_delimiter

#: Bytes that suggest types at the start of the first CSV file or every JSON file; bytes of every other place of the
#: sample, and largest number of files in it.
SAMPLE_BYTES = 1 << 20
PLACE_BYTES, SAMPLE_FILES = 64 << 10, 16
#: Smallest number of bytes of a row: a character and a line break.
SHORTEST_ROW = 2
#: Number of bad values that are converted to Python at once.
AT_ONCE = 4096


@dataclass(frozen=True)
class TextJob:
    """Job of one worker: convert a block to columns of ``types`` and write them to ``path``."""

    block: TextBlock
    names: list[str]
    types: dict[str, str]
    config: DataConfig
    has_header: bool
    path: Path
    target: str = ""


@dataclass(frozen=True)
class ConvertedBlock:
    """Converted block: its rows in ``path``, number of records, readings of counted columns, and bad rows.

    ``others`` are columns that the plan lacks, with inferred types.
    """

    file: str
    path: Path
    rows: int
    read: int
    readings: dict[str, Readings]
    bad: QuarantinedRows
    #: Bytes of the file that the block covers.
    size: int
    others: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        return [self.path, *self.bad.spools]


@dataclass(frozen=True)
class TextPlan:
    """Plan for reading text files: columns of every file; types, warnings, settings and partitions of all files.

    The settings include the detected delimiter.
    """

    files: list[SourceFile]
    names: list[list[str]]
    types: dict[str, str]
    warnings: list[str]
    config: DataConfig
    partitions: Partitions = Partitions()
    target: str = ""
    indices: list[str] = field(default_factory=list)


def open_text(source: ResolvedSource, scratch: ResumableScratch) -> TableInput:
    """Convert text files to a table in ``scratch``; raise ``UserError`` for bad data."""
    plan = plan_text(source)
    while True:
        pieces = list(within_limit(scratch.map(make_columnar, text_jobs(plan, scratch.root)), plan))
        other = revise_plan(pieces, plan)
        if other is None:
            return text_table_input(pieces, plan)
        plan = other


def within_limit(pieces: Iterable[ConvertedBlock], plan: TextPlan) -> Iterator[ConvertedBlock]:
    """Yield the pieces; raise ``UserError`` once too many rows are bad whatever the remaining bytes hold."""
    # Rows that do not fit an inferred type do not count, as another plan may read them.
    config, known = plan.config, all(file.compression is None for file in plan.files)
    declared = [name for name in config.types if not is_counted(name, config)]
    left, read, certain = sum(file.size for file in plan.files), 0, QuarantinedRows()
    for piece in pieces:
        yield piece
        reasons = [each for each in piece.bad.reasons if each.first.column in ("", *declared)]
        certain += QuarantinedRows(reasons)
        left, read = left - piece.size, read + piece.read
        if known and left > 0 and config.encoding == "utf-8":
            quarantine.check_limit(certain, read + left // SHORTEST_ROW, config.quarantine_limit, certain=True)


def plan_text(source: ResolvedSource) -> TextPlan:
    """Return a plan with the names in the headers and types inferred from a sample.

    Raises ``UserError`` if CSV files have different columns.
    """
    plan = (plan_json if source.format == "json" else plan_csv)(source)
    return replace(plan, partitions=find_partitions(source), target=source.target)


def plan_csv(source: ResolvedSource) -> TextPlan:
    files, config = list(source.files), source.config
    delimiter, detected = detect_delimiter(files, config)
    for warning in detected:
        logger("prepare").info(warning)
    config = replace(config, delimiter=delimiter)
    headers = [text_names(file, config) for file in files]
    indices = list(dict.fromkeys(name for names in headers for name in find_indices(names, source)))
    for file, names in zip(files, headers, strict=True):
        check_names(names, file)
        check_columns(headers[0], names, file, files[0], [*config.drop, *indices])
    config = replace(config, drop=[*config.drop, *indices])
    names_of = dict(zip(files, headers, strict=True))
    parsed = [
        csv_blocks.parse_csv_block(block, names_of[file], config, config.header and place == 0)
        for file in sampled_files(files)
        for place, block in enumerate(csv_blocks.sample_blocks(file, config, head_bytes(file, files), PLACE_BYTES))
    ]
    types = guess_columns(parsed, list(dict.fromkeys(name for names in headers for name in names)), config)
    return TextPlan(files, headers, types, detected, config, indices=indices)


def sampled_files(files: list[SourceFile]) -> list[SourceFile]:
    """Return the first file, the last, and at most 14 that are evenly distributed between them."""
    filled = [file for file in files if file.size]
    places = np.linspace(0, len(filled) - 1, min(SAMPLE_FILES, len(filled))).round().astype(int)
    return [filled[place] for place in places]


def head_bytes(file: SourceFile, files: list[SourceFile]) -> int:
    return SAMPLE_BYTES if file == files[0] else PLACE_BYTES


def plan_json(source: ResolvedSource) -> TextPlan:
    """Plan from the first lines of every file and the sample; a key that a line or file lacks is a missing value."""
    files, config = list(source.files), source.config
    if config.columns or not config.header:
        raise UserError("data.columns, data.header: are for CSV; JSON names its values itself, so remove both")
    config = replace(config, quote="", escape="")  # no quotes span lines
    sampled = {file.uri for file in sampled_files(files)}
    parsed = []
    for file in files:
        blocks = csv_blocks.sample_blocks(file, config, head_bytes(file, files), PLACE_BYTES)
        blocks = blocks if file.uri in sampled else islice(blocks, 1)
        parsed += json_lines.parse_sample(file, blocks, config)
    names = list(dict.fromkeys(name for each in parsed for name in each.table.column_names))
    indices = find_indices(names, source)
    config = replace(config, drop=[*config.drop, *indices])
    return TextPlan(files, [names] * len(files), guess_columns(parsed, names, config), [], config, indices=indices)


def parse_block(job: TextJob) -> ParsedBlock:
    if job.config.format == "json":
        return json_lines.parse_json_block(job.block, job.names, job.config)
    return csv_blocks.parse_csv_block(job.block, job.names, job.config, job.has_header)


def guess_columns(parsed: list[ParsedBlock], names: list[str], config: DataConfig) -> dict[str, str]:
    """Return the types of the columns ``names``: declared, or inferred from parsed blocks.

    Dropped columns are not read.
    """
    types = {}
    for name in names:
        declared = DECLARED.get(config.types.get(name, ""), value_types.OTHER)
        types[name] = guess_type(name, parsed, config) if is_counted(name, config) else declared
    return types


def guess_type(name: str, parsed: list[ParsedBlock], config: DataConfig) -> str:
    number_format = NumberFormat.of(config)
    found = [
        replace(count_readings(in_one(block.table[name]), number_format), nested=name in block.nested)
        for block in parsed
        if name in block.table.column_names
    ]
    try:
        return decide_type(name, total_readings(found), config, tolerated_share(config))
    except UserError:
        return value_types.TEXT  # other rows may tell the order of a declared date


def decide_pieces(pieces: list[ConvertedBlock], plan: TextPlan) -> tuple[dict[str, str], list[str]]:
    """Return the types of the counted columns by all values, and warnings."""
    names = [name for name in plan.types if is_counted(name, plan.config)]
    found = {name: total_readings([p.readings[name] for p in pieces if name in p.readings]) for name in names}
    return decide_types(found, plan.config)


def revise_plan(pieces: list[ConvertedBlock], plan: TextPlan) -> TextPlan | None:
    """Return a plan with unexpected columns, or with other types that all values decide; ``None`` if ``plan`` fits."""
    others = {name: kind for piece in reversed(pieces) for name, kind in piece.others.items()}
    if others:
        return replace(plan, names=[[*names, *others] for names in plan.names], types=plan.types | others)
    types, _ = decide_pieces(pieces, plan)
    # Text can be converted later, and integers become numbers.
    fitting = {(value_types.INTEGER, value_types.NUMBER), *((value_types.TEXT, kind) for kind in types.values())}
    wrong = {name: kind for name, kind in types.items() if plan.types[name] != kind}
    wrong = {name: kind for name, kind in wrong.items() if (plan.types[name], kind) not in fitting}
    return replace(plan, types=plan.types | wrong) if wrong else None


def text_table_input(pieces: list[ConvertedBlock], plan: TextPlan) -> TableInput:
    first_rows = accumulate((piece.rows for piece in pieces), initial=0)
    units = [
        Unit(piece.file, str(piece.path), "arrow", 0, piece.rows, first, 0, partition=plan.partitions.of(piece.file))
        for piece, first in zip(pieces, first_rows, strict=False)
        if piece.rows
    ]
    decided, warnings = decide_pieces(pieces, plan)
    types = plan.partitions.beside(plan.types | decided)
    bad = QuarantinedRows.joined([piece.bad for piece in pieces])
    return TableInput(units, types, sum(piece.read for piece in pieces), bad, plan.warnings + warnings, plan.indices)


def text_names(file: SourceFile, config: DataConfig) -> list[str]:
    first = read_header(file, config)
    if config.header:
        if config.columns:
            raise UserError("data.columns: names the columns of a file without a header; set data.header to false")
        return [name or f"unnamed_{index + 1}" for index, name in enumerate(first)]
    if not config.columns:
        raise UserError(f"data.columns: {file.uri} has no header, so its {len(first)} columns must be named here")
    if len(config.columns) != len(first):
        raise UserError(
            f"data.columns: names {len(config.columns)} columns, but the first line of {file.uri} has {len(first)}"
        )
    return config.columns


def text_jobs(plan: TextPlan, scratch: Path) -> Iterator[TextJob]:
    number = 0
    for file, names in zip(plan.files, plan.names, strict=True):
        for index, block in enumerate(read_blocks(file, plan.config)):
            path = scratch / f"text-{number:06d}.arrow"
            has_header = plan.config.header and index == 0
            yield TextJob(block, names, plan.types, plan.config, has_header, path, plan.target)
            number += 1


def make_columnar(job: TextJob) -> ConvertedBlock:
    """Parse a block, convert its values, and write the rows; quarantine bad rows. Runs in a worker process."""
    parsed = parse_block(job)
    number_format = NumberFormat.of(job.config)
    arrays: dict[str, pa.Array] = {}
    readings: dict[str, Readings] = {}
    bad: list[Iterable[BadRow]] = [sorted(parsed.bad, key=line_of)]
    keep = np.ones(parsed.table.num_rows, bool)
    for name, column in zip(job.names, parsed.table.columns, strict=False):
        kind, texts = job.types[name], in_one(column)
        if kind == value_types.OTHER:
            arrays[name] = pa.nulls(len(column), pa.binary())
            failed = np.zeros(len(column), bool)
        else:
            arrays[name], failed = number_format.convert(texts, kind)
        if is_counted(name, job.config):
            readings[name] = readings_of(name, arrays[name], failed, texts, parsed, job)
        if name == job.target and kind == value_types.TEXT:
            arrays[name] = with_marks(arrays[name], texts)
        if not failed.any():
            continue
        rows = np.flatnonzero(failed & keep)
        bad.append(unreadable_rows(job, name, parsed.lines, rows, texts))
        keep[rows] = False
    batch = pa.RecordBatch.from_pydict(
        {name: arrays[name] for name in job.types if name in arrays}
        | {LINE: pa.array(parsed.lines)}
        | identities(parsed, job)
    )
    if not keep.all():
        batch = batch.filter(pa.array(keep))
    write_spool(job.path, batch)
    others = guess_columns([parsed], parsed.table.column_names[len(job.names) :], job.config)
    aside = QuarantinedRows.spooled(heapq.merge(*bad, key=line_of), job.path.with_suffix(".bad"))
    size = job.block.size
    return ConvertedBlock(job.block.file, job.path, batch.num_rows, parsed.read, readings, aside, size, others)


def readings_of(
    name: str, column: pa.Array, failed: np.ndarray, texts: pa.Array, parsed: ParsedBlock, job: TextJob
) -> Readings:
    """Return the readings of the ``texts`` of a column that were converted to ``column`` unless they ``failed``."""
    kind, nested = job.types[name], name in parsed.nested
    if nested or kind == value_types.OTHER:
        return Readings(nested=True)
    if not failed.any() and (found := read_as(column, texts, kind)):
        return found
    coded = column if kind == value_types.TEXT else texts
    return count_readings(coded, NumberFormat.of(job.config), parsed.file, name, parsed.lines)


def line_of(row: BadRow) -> int:
    return row.line


def unreadable_rows(job: TextJob, name: str, lines: np.ndarray, rows: np.ndarray, texts: pa.Array) -> Iterator[BadRow]:
    reason = f"not {job.types[name]}"
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        for row, text in zip(some.tolist(), texts.take(pa.array(some)).to_pylist(), strict=True):
            yield BadRow(job.block.file, int(lines[row]), name, reason, text)


def with_marks(column: pa.Array, texts: pa.Array) -> pa.Array:
    # The quarantine names the marks for "missing" in the target.
    marks = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.and_(pc.is_null(column), pc.not_equal(marks, "")), marks, column)


def in_one(column: pa.ChunkedArray) -> pa.Array:
    # Combining a single chunk would copy it.
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def identities(parsed: ParsedBlock, job: TextJob) -> dict[str, pa.Array]:
    """Return columns with the hashes of ``data.group`` and, if rows lack it, of ``data.id``; those in the file."""
    hashes: dict[str, pa.Array] = {}
    for name in job.config.identities:
        if name in job.names:
            texts, number_format = in_one(parsed.table[name]), NumberFormat.of(job.config)
            own = hash_identities(texts, number_format, name, job.block.file, parsed.lines)
            hashes[IDENTITY + name] = pa.array(own)
            if not (own == MISSING).any():
                break
    return hashes
