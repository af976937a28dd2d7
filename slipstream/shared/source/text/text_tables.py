"""Text tables (CSV, JSON Lines), converted to Arrow block by block, with types inferred from the first rows."""

from __future__ import annotations

import csv
import heapq
from collections import Counter
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
from slipstream.shared.source.columns.number_formats import NumberFormat, guess_types, taken_as_text, tolerated_share
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow, QuarantinedRows
from slipstream.shared.source.resolved import ResolvedSource
from slipstream.shared.source.tables import Partitions, check_columns, check_names, find_indices, find_partitions
from slipstream.shared.source.text import csv_blocks, json_lines
from slipstream.shared.source.text.csv_blocks import ParsedBlock, TextBlock, csv_reader, read_blocks, read_header

#: Bytes read to infer types (from the first CSV file or every JSON file), and to detect the delimiter (from every
#: file).
SAMPLE_BYTES = 1 << 20
DELIMITER_BYTES = 64 << 10
USUAL_DELIMITER = ","
OTHER_DELIMITERS = (";", "\t", "|")
#: Number of records, or all if there are fewer, that a delimiter must cut into equally many fields.
AGREEING = 20
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
    """Converted block: its rows in ``path``, number of records, types and bad rows.

    ``others`` are columns that the plan lacks, with inferred types.
    """

    file: str
    path: Path
    rows: int
    read: int
    types: dict[str, str]
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
    # Rows that do not fit a guessed type do not count, as another plan may read them.
    config, known = plan.config, all(file.compression is None for file in plan.files)
    left, read, certain = sum(file.size for file in plan.files), 0, QuarantinedRows()
    for piece in pieces:
        yield piece
        reasons = [each for each in piece.bad.reasons if each.first.column in ("", *config.types)]
        certain += QuarantinedRows(reasons)
        left, read = left - piece.size, read + piece.read
        if known and left > 0 and config.encoding == "utf-8":
            quarantine.check_limit(certain, read + left // SHORTEST_ROW, config.quarantine_limit, certain=True)


def plan_text(source: ResolvedSource) -> TextPlan:
    """Return a plan with the names in the headers and types inferred from the first rows.

    Raises ``UserError`` if CSV files have different columns.
    """
    plan = (plan_json if source.format == "json" else plan_csv)(source)
    types = plan.types | dict.fromkeys(plan.indices, value_types.OTHER)
    return replace(plan, types=types, partitions=find_partitions(source), target=source.target)


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
    sample = next(read_blocks(files[0], config, SAMPLE_BYTES))
    types, warnings = guess_columns(
        csv_blocks.parse_csv_block(sample, headers[0], config, config.header), headers[0], config
    )
    others = {name: value_types.OTHER for names in headers for name in names if name not in types}
    return TextPlan(files, headers, types | others, detected + warnings, config, indices=indices)


def plan_json(source: ResolvedSource) -> TextPlan:
    """Plan from the first lines of every file; a key that a line or file lacks is a missing value."""
    files, config = list(source.files), source.config
    if config.columns or not config.header:
        raise UserError("data.columns, data.header: are for CSV; JSON names its values itself, so remove both")
    config = replace(config, quote="", escape="")  # no quotes span lines
    types: dict[str, str] = {}
    warnings: list[str] = []
    for file in files:
        sample = json_lines.first_lines(file, config, SAMPLE_BYTES)
        new = [name for name in sample.table.column_names if name not in types]
        of_file, of_file_warnings = guess_columns(sample, new, config)
        types, warnings = types | of_file, warnings + of_file_warnings
    indices = find_indices(list(types), source)
    return TextPlan(files, [list(types)] * len(files), types, warnings, config, indices=indices)


def parse_block(job: TextJob) -> ParsedBlock:
    if job.config.format == "json":
        return json_lines.parse_json_block(job.block, job.names, job.config)
    return csv_blocks.parse_csv_block(job.block, job.names, job.config, job.has_header)


def guess_columns(parsed: ParsedBlock, names: list[str], config: DataConfig) -> tuple[dict[str, str], list[str]]:
    """Infer the types of the columns ``names`` of a parsed block by :func:`.number_formats.guess_types`."""
    texts = {name: parsed.table[name].combine_chunks() for name in names if name not in parsed.nested}
    types, warnings = guess_types(texts, parsed.file, parsed.lines, config)
    return {name: types.get(name, value_types.OTHER) for name in names}, warnings


def revise_plan(pieces: list[ConvertedBlock], plan: TextPlan) -> TextPlan | None:
    """Return a plan with unexpected columns added and wrongly guessed columns as text, or ``None`` if ``plan`` fits."""
    others = {name: kind for piece in reversed(pieces) for name, kind in piece.others.items()}
    if others:
        return replace(plan, names=[[*names, *others] for names in plan.names], types=plan.types | others)
    read = sum(piece.read for piece in pieces)
    reasons = QuarantinedRows.joined([piece.bad for piece in pieces]).reasons
    failures = Counter[str]()
    for each in reasons:
        failures[each.first.column] += each.rows
    most, declared = tolerated_share(plan.config) * read, plan.config.types
    mixed = [name for name, count in failures.items() if name and count > most and name not in declared]
    if not mixed:
        return None
    warnings = list(plan.warnings)
    for name in mixed:
        example = next(each.first for each in reasons if each.first.column == name)
        warnings.append(taken_as_text(example, f"{failures[name]:,} of {read:,} values", plan.types[name]))
    types = plan.types | dict.fromkeys(mixed, value_types.TEXT)
    return replace(plan, types=types, warnings=warnings)


def text_table_input(pieces: list[ConvertedBlock], plan: TextPlan) -> TableInput:
    first_rows = accumulate((piece.rows for piece in pieces), initial=0)
    units = [
        Unit(piece.file, str(piece.path), "arrow", 0, piece.rows, first, 0, partition=plan.partitions.of(piece.file))
        for piece, first in zip(pieces, first_rows, strict=False)
        if piece.rows
    ]
    types = plan.types
    for piece in pieces:
        types = {name: value_types.wider_type(kind, piece.types[name]) or kind for name, kind in types.items()}
    bad = QuarantinedRows.joined([piece.bad for piece in pieces])
    read = sum(piece.read for piece in pieces)
    return TableInput(units, plan.partitions.beside(types), read, bad, plan.warnings, plan.indices)


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
    bad: list[Iterable[BadRow]] = [sorted(parsed.bad, key=line_of)]
    keep = np.ones(parsed.table.num_rows, bool)
    for name, column in zip(job.names, parsed.table.columns, strict=False):
        if job.types[name] == value_types.OTHER:
            arrays[name] = pa.nulls(len(column), pa.binary())
            continue
        texts = in_one(column)
        arrays[name], failed = number_format.convert(texts, job.types[name])
        if name == job.target and job.types[name] == value_types.TEXT:
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
    types = job.types | {name: value_types.column_type(array.type) for name, array in arrays.items()}
    others, _ = guess_columns(parsed, parsed.table.column_names[len(job.names) :], job.config)
    aside = QuarantinedRows.spooled(heapq.merge(*bad, key=line_of), job.path.with_suffix(".bad"))
    size = job.block.size
    return ConvertedBlock(job.block.file, job.path, batch.num_rows, parsed.read, types, aside, size, others)


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


# Delimiters


def detect_delimiter(files: list[SourceFile], config: DataConfig) -> tuple[str, list[str]]:
    """Return the delimiter of all files, with a warning if it is neither a comma nor implied by the file names.

    Raise ``UserError`` if the files disagree.
    """
    if config.delimiter:
        return config.delimiter, []
    delimiters = {file.uri: delimiter_of(file, config) for file in files}
    first, mark = next(iter(delimiters.items()))
    other = next((uri for uri, delimiter in delimiters.items() if delimiter != mark), None)
    if other:
        raise UserError(
            f"{other}: its fields are separated by {delimiters[other]!r}, but by {mark!r} in {first}; expected one "
            "delimiter in all files; set data.delimiter if the detected one is wrong"
        )
    if mark == USUAL_DELIMITER or all(map(has_tabs, files)):
        return mark, []
    where = first if len(files) == 1 else f"{first} and {len(files) - 1:,} more"
    return mark, [f"delimiter {mark!r} detected in {where}: if it is wrong, set data.delimiter"]


def delimiter_of(file: SourceFile, config: DataConfig) -> str:
    """Return the delimiter of a file: a tab for ``.tsv``, else usually a comma.

    Another mark is returned if the first line has no comma, and only this mark cuts all of the first records, header
    included, into equally many fields.
    """
    taken = (config.quote, config.escape)
    if has_tabs(file) and "\t" not in taken:
        return "\t"
    block = next(read_blocks(file, config, DELIMITER_BYTES), None)
    if block is None or block.fault:
        return USUAL_DELIMITER
    if any(len(record) > 1 for record in first_records(block.data, USUAL_DELIMITER, config)[:1]):
        return USUAL_DELIMITER
    fitting = [mark for mark in OTHER_DELIMITERS if mark not in taken and cuts_alike(block.data, mark, config)]
    return fitting[0] if len(fitting) == 1 else USUAL_DELIMITER


def has_tabs(file: SourceFile) -> bool:
    return ".tsv" in [suffix.lower() for suffix in Path(file.name).suffixes[-2:]]


def cuts_alike(data: bytes, mark: str, config: DataConfig) -> bool:
    widths = {len(record) for record in first_records(data, mark, config)}
    return len(widths) == 1 and widths.pop() > 1


def first_records(data: bytes, mark: str, config: DataConfig) -> list[list[str]]:
    """Return the first non-empty records, cut by ``mark``; none if they cannot be parsed."""
    reader = csv_reader(data.decode(), replace(config, delimiter=mark))
    try:
        return list(islice(filter(None, reader), AGREEING))
    except csv.Error:
        return []
