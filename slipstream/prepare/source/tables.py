"""From the user's files to columnar units: Parquet and Arrow are read where they lie, text is first made columnar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.prepare.columns import value_types
from slipstream.prepare.columns.number_formats import DECLARED, NumberFormat, cannot_become
from slipstream.prepare.columns.type_inference import guess_types, taken_as_text, tolerance
from slipstream.prepare.config import DataConfig
from slipstream.prepare.quarantine import BadRow
from slipstream.prepare.source.columnar import LINE, Unit, units_of, write_spool
from slipstream.prepare.source.files import Listing, SourceFile, format_of
from slipstream.prepare.source.partitions import Partitions, find_partitions
from slipstream.prepare.source.text import json_lines
from slipstream.prepare.source.text.csv_blocks import Block, Parsed, parse, read_blocks, read_header
from slipstream.prepare.source.text.delimiters import detect_delimiter
from slipstream.prepare.source.text.folders import open_documents
from slipstream.prepare.source.text_columns import infer_types
from slipstream.prepare.workers.resume import ResumableScratch

#: Of the first file, as much is looked at to guess the types.
SAMPLE_BYTES = 1 << 20
#: Formats of text that is first made columnar.
TEXT_TABLES = ("csv", "json")
TextFormat = Literal["csv", "json"]


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


def open_source(
    data: Listing, config: DataConfig, place: ResumableScratch, files: list[SourceFile] | None = None
) -> Source:
    """Check and open the listed files, or those ``files`` of them. Text is spooled into ``place``.

    Raises ``UserError`` for what is wrong.
    """
    files = [file for file in files or data.files if file.size]
    format = one_format(data, config, files)
    if format in TEXT_TABLES:
        source = ingest_text(data, files, config, place)
    elif format == "text":
        units, types, bad = open_documents(data, files, config, place)
        source = Source(units, types, sum(unit.rows for unit in units) + len(bad), bad)
    else:
        source = open_columnar(data, files, format, config, place)
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
    reserved = [name for name in names if name.startswith("\0")]
    if reserved:
        raise UserError(f"{file.uri}: the column name {reserved[0]!r} begins with NUL; expected another name")


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


def open_columnar(
    data: Listing, files: list[SourceFile], format: str, config: DataConfig, place: ResumableScratch
) -> Source:
    partitions = partitions_of(data, files, config)
    units: list[Unit] = []
    types: dict[str, str] = {}
    # A dictionary says that its texts are categories; what is declared or dropped is not asked for.
    settled = {*config.types, *config.drop}
    first_row = 0
    for file in files:
        schema, pieces = units_of(file, format, first_row)
        check_names(schema.names, file)
        found = {field.name: declared_type(field, file, config) for field in schema}
        types = found if not types else merge_types(types, found, file, files[0])
        settled |= {field.name for field in schema if pa.types.is_dictionary(field.type)}
        units += [replace(piece, partition=partitions.of(file.uri)) for piece in pieces if piece.rows]
        first_row += sum(piece.rows for piece in pieces)
    # As for a column of a CSV in which there is nothing.
    types = {name: value_types.NUMBER if kind == value_types.NOTHING else kind for name, kind in types.items()}
    texts = [name for name, kind in types.items() if kind == value_types.TEXT and name not in settled]
    inferred, warnings = infer_types(units, texts, config, place)
    return Source(units, partitions.beside(types | inferred), first_row, [], warnings)


def partitions_of(data: Listing, files: list[SourceFile], config: DataConfig) -> Partitions:
    return find_partitions([(data.relative(file), file.uri) for file in files], config)


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
    """What became of a block: its rows in ``path``, how many records it had, its types and what was set aside.

    ``others`` are columns that nobody expected, and what they seem to hold.
    """

    file: str
    path: Path
    rows: int
    read: int
    types: dict[str, str]
    bad: list[BadRow]
    others: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        return [self.path]


@dataclass(frozen=True)
class TextPlan:
    """How text files are read: the columns of each of them and, for all, the types, with a word on some, the format,
    the delimiter and what their directories say."""

    files: list[SourceFile]
    names: list[list[str]]
    types: dict[str, str]
    warnings: list[str]
    format: TextFormat = "csv"
    delimiter: str = ","
    partitions: Partitions = Partitions()


def ingest_text(data: Listing, files: list[SourceFile], config: DataConfig, place: ResumableScratch) -> Source:
    plan = plan_text(data, files, config)
    while True:
        pieces = list(place.map(make_columnar, text_jobs(plan, config, place.root)))
        other = replan(pieces, plan, config)
        if other is None:
            return source_of(pieces, plan)
        plan = other


def plan_text(data: Listing, files: list[SourceFile], config: DataConfig) -> TextPlan:
    """Read what is in the headers and guess from the first rows. Raises ``UserError`` if the files do not agree."""
    format = one_format(data, config, files)
    plan = plan_json(files, config) if format == "json" else plan_csv(files, config)
    return replace(plan, partitions=partitions_of(data, files, config))


def plan_csv(files: list[SourceFile], config: DataConfig) -> TextPlan:
    delimiter, detected = detect_delimiter(files, config)
    for word in detected:
        logger("prepare").info(word)
    config = reading(config, "csv", delimiter)
    headers = [text_names(file, config) for file in files]
    for file, names in zip(files, headers, strict=True):
        check_names(names, file)
        check_columns(headers[0], names, file, files[0])
    sample = next(read_blocks(files[0], config, SAMPLE_BYTES))
    types, warnings = guess_columns(parse(sample, headers[0], config, config.header), headers[0], config)
    return TextPlan(files, headers, types, detected + warnings, "csv", delimiter)


def plan_json(files: list[SourceFile], config: DataConfig) -> TextPlan:
    """Of each file the first lines; what a line, or all of a file, lacks is missing there."""
    if config.columns or not config.header:
        raise UserError("data.columns, data.header: are for CSV; JSON names its values itself, so leave both out")
    types: dict[str, str] = {}
    warnings: list[str] = []
    for file in files:
        sample = json_lines.first_lines(file, reading(config, "json", ""), SAMPLE_BYTES)
        found, words = guess_columns(sample, [n for n in sample.table.column_names if n not in types], config)
        types, warnings = types | found, warnings + words
    return TextPlan(files, [list(types)] * len(files), types, warnings, "json", "")


def reading(config: DataConfig, format: TextFormat, delimiter: str) -> DataConfig:
    """The settings with which text of this format is read. Lines of JSON have no quotes that span them."""
    config = replace(config, format=format, delimiter=delimiter)
    return replace(config, quote="", escape="") if format == "json" else config


def guess_columns(parsed: Parsed, names: list[str], config: DataConfig) -> tuple[dict[str, str], list[str]]:
    """As :func:`.type_inference.guess_types`, of those columns of what was parsed."""
    texts = {name: parsed.table[name].combine_chunks() for name in names if name not in parsed.nested}
    types, warnings = guess_types(texts, parsed.file, parsed.lines, config)
    return {name: types.get(name, value_types.OTHER) for name in names}, warnings


def parse_text(block: Block, names: list[str], config: DataConfig, skip_header: bool) -> Parsed:
    return (
        json_lines.parse(block, names, config) if config.format == "json" else parse(block, names, config, skip_header)
    )


def replan(pieces: list[TextPiece], plan: TextPlan, config: DataConfig) -> TextPlan | None:
    """The plan with those columns as text that are not what they were guessed to be, and with those that nobody
    expected; ``None`` if there are none."""
    others = {name: kind for piece in reversed(pieces) for name, kind in piece.others.items()}
    if others:
        return replace(plan, names=[[*names, *others] for names in plan.names], types=plan.types | others)
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
        Unit(piece.file, str(piece.path), "arrow", 0, piece.rows, first, 0, partition=plan.partitions.of(piece.file))
        for piece, (first, _) in zip(pieces, pairwise(first_rows), strict=True)
        if piece.rows
    ]
    types = plan.types
    for piece in pieces:
        types = {name: value_types.wider(kind, piece.types[name]) or kind for name, kind in types.items()}
    bad = [row for piece in pieces for row in piece.bad]
    return Source(units, plan.partitions.beside(types), sum(piece.read for piece in pieces), bad, plan.warnings)


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
    config = reading(config, plan.format, plan.delimiter)
    number = 0
    for file, names in zip(plan.files, plan.names, strict=True):
        for index, block in enumerate(read_blocks(file, config)):
            path = scratch / f"text-{number:06d}.arrow"
            yield TextJob(block, names, plan.types, config, config.header and index == 0, path)
            number += 1


def make_columnar(job: TextJob) -> TextPiece:
    """Parse a block, read its values as their types, set bad rows aside and spool the others."""
    parsed = parse_text(job.block, job.names, job.config, job.has_header)
    number_format = NumberFormat.of(job.config)
    arrays, bad = {}, list(parsed.bad)
    keep = np.ones(parsed.table.num_rows, bool)
    for name, column in zip(job.names, parsed.table.columns, strict=False):
        if job.types[name] == value_types.OTHER:
            arrays[name] = pa.nulls(len(column), pa.binary())
            continue
        # To combine one chunk would copy it.
        texts = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        arrays[name], failed = number_format.convert(texts, job.types[name])
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
    others, _ = guess_columns(parsed, parsed.table.column_names[len(job.names) :], job.config)
    bad.sort(key=lambda row: row.line)
    return TextPiece(job.block.file, job.path, batch.num_rows, parsed.read, types, bad, others)
