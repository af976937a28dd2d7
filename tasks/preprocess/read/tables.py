"""From the user's files to columnar units: Parquet and Arrow are read where they lie, text is first made columnar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from tasks.errors import UserError
from tasks.preprocess.columns import value_types
from tasks.preprocess.columns.number_formats import DECLARED, Spelling, cannot_become, readings
from tasks.preprocess.config import DataConfig
from tasks.preprocess.pool.resume import Workplace
from tasks.preprocess.quarantine import BadRow
from tasks.preprocess.read.columnar import LINE, Unit, units_of, write_spool
from tasks.preprocess.read.csv_blocks import Block, Parsed, parse, read_blocks, read_header
from tasks.preprocess.read.files import Listing, SourceFile, format_of
from tasks.preprocess.read.text_folders import open_documents

#: Of the first file, as much is looked at to guess the types.
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """The input, ready to be read. ``types`` are by column, in the order of the file; ``read`` counts all records."""

    units: list[Unit]
    types: dict[str, str]
    read: int
    bad: list[BadRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(unit.rows for unit in self.units)


def open_source(data: Listing, config: DataConfig, place: Workplace, files: list[SourceFile] | None = None) -> Source:
    """Check and open the listed files, or those ``files`` of them. Text is spooled into ``place``.

    Raises ``UserError`` for what is wrong.
    """
    files = [file for file in files or data.files if file.size]
    format = one_format(data, config, files)
    if format == "csv":
        source = ingest_text(files, config, place)
    elif format == "text":
        units, types, bad = open_documents(data, files, config, place)
        source = Source(units, types, sum(unit.rows for unit in units) + len(bad), bad)
    else:
        source = open_columnar(files, format, config)
    return check_rows(source, data)


def check_rows(source: Source, data: Listing) -> Source:
    if source.read == 0:
        raise UserError(f"data: {data.address!r} has a header and no rows; expected at least one row of data")
    return source


def one_format(data: Listing, config: DataConfig, files: list[SourceFile]) -> str:
    formats = {format_of(file, config.format) for file in files}
    if len(formats) > 1:
        raise UserError(f"data: {data.address!r} mixes {' and '.join(sorted(formats))} files; expected one format")
    return formats.pop()


def check_names(names: list[str], file: SourceFile) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(
            f"{file.uri}: the column name {twice[0]!r} appears more than once; expected different names"
            + header_hint(names)
        )


def header_hint(names: list[str]) -> str:
    """What to do if the names are values: the first line is data then."""
    if not any(looks_like_value(name) for name in names):
        return ""
    return "; if the first line is data, set data.header to false and name the columns in data.columns"


def looks_like_value(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


# Columnar files


def open_columnar(files: list[SourceFile], format: str, config: DataConfig) -> Source:
    units: list[Unit] = []
    types: dict[str, str] = {}
    first_row = 0
    for file in files:
        schema, pieces = units_of(file, format, first_row)
        check_names(schema.names, file)
        found = {field.name: declared_type(field, file, config) for field in schema}
        types = found if not types else merge_types(types, found, file, files[0])
        units += [piece for piece in pieces if piece.rows]
        first_row += sum(piece.rows for piece in pieces)
    return Source(units, types, first_row)


def declared_type(field: pa.Field, file: SourceFile, config: DataConfig) -> str:
    """What a column is read as: what data.types says, else what the file does."""
    found = value_types.type_of(field.type)
    if field.name not in config.types:
        return found
    kind = DECLARED[config.types[field.name]]
    if cannot_become(found, kind):
        raise UserError(
            f"data.types.{field.name}: {file.uri} holds {found} values there ({field.type}), which cannot be read as "
            f"{config.types[field.name]}; leave the column as it is or drop it"
        )
    return kind


def merge_types(known: dict[str, str], found: dict[str, str], file: SourceFile, first: SourceFile) -> dict[str, str]:
    check_columns(list(known), list(found), file, first)
    merged = {}
    for name, kind in known.items():
        both = value_types.wider(kind, found[name])
        if both is None:
            raise UserError(
                f"{file.uri}: column {name!r} holds {found[name]} values, but {kind} in {first.uri}; "
                "expected one schema in all files"
            )
        merged[name] = both
    return merged


def check_columns(known: list[str], found: list[str], file: SourceFile, first: SourceFile) -> None:
    if set(known) == set(found):
        return
    lacks, adds = sorted(set(known) - set(found)), sorted(set(found) - set(known))
    differences = [f"lacks {lacks[0]!r}"] if lacks else []
    differences += [f"also has {adds[0]!r}"] if adds else []
    raise UserError(
        f"{file.uri}: {' and '.join(differences)}, unlike {first.uri}; expected the same columns in all files"
    )


# Text


@dataclass(frozen=True)
class TextJob:
    """One block to be made columnar with the given types, into ``path``."""

    block: Block
    names: list[str]
    types: dict[str, str]
    config: DataConfig
    has_header: bool
    path: Path


@dataclass(frozen=True)
class TextPiece:
    """What became of a block: its rows in ``path``, how many records it had, its types and what was set aside."""

    file: str
    path: Path
    rows: int
    read: int
    types: dict[str, str]
    bad: list[BadRow]

    @property
    def files(self) -> list[Path]:
        return [self.path]


@dataclass(frozen=True)
class TextPlan:
    """How text files are read: the columns of each of them and, for all, the types, with a word on some."""

    files: list[SourceFile]
    names: list[list[str]]
    types: dict[str, str]
    warnings: list[str]


def ingest_text(files: list[SourceFile], config: DataConfig, place: Workplace) -> Source:
    plan = plan_text(files, config)
    while True:
        pieces = list(place.map(make_columnar, text_jobs(plan, config, place.root)))
        other = replan(pieces, plan, config)
        if other is None:
            return source_of(pieces, plan)
        plan = other


def plan_text(files: list[SourceFile], config: DataConfig) -> TextPlan:
    """Read what is in the headers and guess from the first rows. Raises ``UserError`` if the files do not agree."""
    headers = [text_names(file, config) for file in files]
    for file, names in zip(files, headers, strict=True):
        check_names(names, file)
        check_columns(headers[0], names, file, files[0])
    sample = next(read_blocks(files[0], config, SAMPLE_BYTES))
    parsed = parse(sample, headers[0], config, skip_header=config.header)
    return TextPlan(files, headers, *guess_types(parsed, files[0], config))


def replan(pieces: list[TextPiece], plan: TextPlan, config: DataConfig) -> TextPlan | None:
    """The plan with those columns as text that are not what they were guessed to be; ``None`` if there are none."""
    read = sum(piece.read for piece in pieces)
    bad = [row for piece in pieces for row in piece.bad]
    failures = Counter(row.column for row in bad if row.column)
    mixed = [name for name, count in failures.items() if count > tolerance(config) * read and name not in config.types]
    if not mixed:
        return None
    words = []
    for name in mixed:
        example = next(row for row in bad if row.column == name)
        words.append(taken_as_text(example, f"{failures[name]:,} of {read:,} values", plan.types[name]))
    types = plan.types | dict.fromkeys(mixed, value_types.TEXT)
    return replace(plan, types=types, warnings=plan.warnings + words)


def source_of(pieces: list[TextPiece], plan: TextPlan) -> Source:
    """All ``pieces`` of the files, in their order, as one input."""
    first_rows = np.concatenate([[0], np.cumsum([piece.rows for piece in pieces])]).astype(int).tolist()
    units = [
        Unit(piece.file, str(piece.path), "arrow", 0, piece.rows, first, 0)
        for piece, (first, _) in zip(pieces, pairwise(first_rows), strict=True)
        if piece.rows
    ]
    types = plan.types
    for piece in pieces:
        types = {name: value_types.wider(kind, piece.types[name]) or kind for name, kind in types.items()}
    bad = [row for piece in pieces for row in piece.bad]
    return Source(units, types, sum(piece.read for piece in pieces), bad, plan.warnings)


def guess_types(parsed: Parsed, file: SourceFile, config: DataConfig) -> tuple[dict[str, str], list[str]]:
    """The type of each column by the first rows, and a word on those that are numbers for the most part only."""
    types, warnings = {}, []
    spelling = Spelling.of(config)
    for name in parsed.table.column_names:
        if name in config.types:
            types[name] = DECLARED[config.types[name]]
            continue
        texts = parsed.table.column(name).combine_chunks()
        types[name] = spelling.guess(texts, tolerance(config))
        if types[name] != value_types.TEXT:
            continue
        failed = value_types.mostly_numbers(spelling.respell(texts, value_types.NUMBER), config.missing)
        if separators := readings(texts, config.missing):
            warnings.append(
                f"column {name!r}: looks like numbers with separators, such as {texts[0].as_py()!r}, and is taken as "
                f"text; if they are numbers, set {' or '.join(separators)}, else declare it in data.types as text"
            )
        elif failed is not None and failed.any():
            row = int(np.flatnonzero(failed)[0])
            example = BadRow(file.uri, int(parsed.lines[row]), name, "", texts[row].as_py())
            share = f"{np.count_nonzero(failed):,} of the first {len(failed):,} values"
            warnings.append(taken_as_text(example, share, value_types.NUMBER))
    return types, warnings


def tolerance(config: DataConfig) -> float:
    """The share of values that may be set aside before a column is taken for text."""
    return min(config.quarantine_limit, 0.1)


def taken_as_text(example: BadRow, share: str, kind: str) -> str:
    return (
        f"column {example.column!r}: {share} are not {kind} (the first is {example.raw[:60]!r} in {example.file}, line "
        f"{example.line}), so it is taken as text; if they mean missing, add them to data.missing"
    )


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


def text_jobs(plan: TextPlan, config: DataConfig, scratch: Path) -> Iterator[TextJob]:
    number = 0
    for file, names in zip(plan.files, plan.names, strict=True):
        for index, block in enumerate(read_blocks(file, config)):
            path = scratch / f"text-{number:06d}.arrow"
            yield TextJob(block, names, plan.types, config, config.header and index == 0, path)
            number += 1


def make_columnar(job: TextJob) -> TextPiece:
    """Parse a block, read its values as their types, set bad rows aside and spool the others."""
    parsed = parse(job.block, job.names, job.config, job.has_header)
    spelling = Spelling.of(job.config)
    arrays, bad = {}, list(parsed.bad)
    keep = np.ones(parsed.table.num_rows, bool)
    for name, column in zip(job.names, parsed.table.columns, strict=True):
        # To combine one chunk would copy it.
        texts = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        arrays[name], failed = spelling.convert(texts, job.types[name])
        if not failed.any():
            continue
        rows = np.flatnonzero(failed & keep)
        reason = f"not {job.types[name]}"
        bad += [
            BadRow(job.block.file, int(parsed.lines[row]), name, reason, text)
            for row, text in zip(rows, texts.take(pa.array(rows)).to_pylist(), strict=True)
        ]
        keep[rows] = False
    batch = pa.RecordBatch.from_pydict({name: arrays[name] for name in job.types} | {LINE: pa.array(parsed.lines)})
    if not keep.all():
        batch = batch.filter(pa.array(keep))
    write_spool(job.path, batch)
    types = {name: value_types.type_of(array.type) for name, array in arrays.items()}
    return TextPiece(
        job.block.file, job.path, batch.num_rows, parsed.read, types, sorted(bad, key=lambda row: row.line)
    )
