"""Tables of columnar files: one schema for all files and their directories; types of text columns are inferred."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.errors import UserError
from slipstream.shared.source.columnar import TableInput, Unit, list_units, read_first_rows, read_unit
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.number_formats import (
    DECLARED,
    NumberFormat,
    cannot_become,
    guess_types,
    taken_as_text,
    tolerated_share,
)
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.memory import MemoryBudget
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.resolved import ResolvedSource

#: Hive's directory name for rows whose partition key is missing.
MISSING = "__HIVE_DEFAULT_PARTITION__"
#: Names of indices that pandas writes without a name, and names of a first column without one.
INDEX = re.compile(r"(?i)__index_level_\d+__|unnamed: 0(\.\d+)*")
FIRST = re.compile(r"(?i)(unnamed[:_] ?\d+)?")
#: Largest number of rows and bytes from which types of text columns are inferred.
SAMPLE_ROWS = 1 << 11
SAMPLE_BYTES = 1 << 20


def open_columnar(source: ResolvedSource, scratch: ResumableScratch) -> TableInput:
    """Open Parquet or Arrow files as a table; raise ``UserError`` for bad data."""
    config, first = source.config, source.files[0]
    partitions = find_partitions(source)
    units: list[Unit] = []
    types: dict[str, str] = {}
    indices: list[str] = []
    # A dictionary marks its texts as categories; declared and dropped columns are not guessed.
    settled = {*config.types, *config.drop}
    first_row = 0
    for file in source.files:
        schema, pieces = list_units(file, source.format, first_row)
        check_names(schema.names, file)
        indices += find_indices(schema.names, source)
        of_file = {field.name: declared_type(field, file, config) for field in schema}
        types = of_file if not types else merge_types(types, of_file, file, first, [*config.drop, *indices])
        settled |= {field.name for field in schema if pa.types.is_dictionary(field.type)}
        units += [replace(piece, partition=partitions.of(file.uri)) for piece in pieces if piece.rows]
        first_row += sum(piece.rows for piece in pieces)
    # As for an empty CSV column.
    types = {name: value_types.NUMBER if kind == value_types.NOTHING else kind for name, kind in types.items()}
    types |= dict.fromkeys(indices, value_types.OTHER)
    texts = [name for name, kind in types.items() if kind == value_types.TEXT and name not in settled]
    inferred, warnings = infer_types(units, texts, config, scratch)
    return TableInput(units, partitions.beside(types | inferred), first_row, warnings=warnings, indices=indices)


def find_indices(names: list[str], source: ResolvedSource) -> list[str]:
    """Return the columns of a file that are indices without a name, unless a setting names them."""
    config = source.config
    special = {source.target, config.id, config.group, config.time, config.weight}
    named = special | {*config.types, *config.drop, *config.columns}
    found = [name for place, name in enumerate(names) if INDEX.fullmatch(name) or (not place and FIRST.fullmatch(name))]
    return [name for name in found if name not in named]


def declared_type(field: pa.Field, file: SourceFile, config: DataConfig) -> str:
    """Return the type of a column: from ``data.types``, else from the file. Raise ``UserError`` if they conflict."""
    stored = value_types.column_type(field.type)
    if field.name not in config.types:
        return stored
    kind = DECLARED[config.types[field.name]]
    if cannot_become(stored, kind):
        raise UserError(
            f"data.types.{field.name}: {file.uri} holds {stored} values there ({field.type}), which cannot be read as "
            f"{config.types[field.name]}; remove the entry from data.types or drop the column"
        )
    return kind


def merge_types(
    types: dict[str, str], of_file: dict[str, str], file: SourceFile, first: SourceFile, dropped: list[str]
) -> dict[str, str]:
    check_columns(list(types), list(of_file), file, first, dropped)
    merged = {**of_file, **types}
    for name, kind in types.items():
        if name in dropped:
            continue
        both = value_types.wider_type(kind, of_file[name])
        if both is None:
            raise UserError(
                f"{file.uri}: column {name!r} holds {of_file[name]} values, but {kind} in {first.uri}; "
                "expected one schema in all files"
            )
        merged[name] = both
    return merged


def check_columns(
    expected: list[str], names: list[str], file: SourceFile, first: SourceFile, dropped: list[str]
) -> None:
    lacks, adds = (sorted({*one} - {*other, *dropped}) for one, other in ((expected, names), (names, expected)))
    if not lacks and not adds:
        return
    differences = [f"lacks {lacks[0]!r}"] if lacks else []
    differences += [f"also has {adds[0]!r}"] if adds else []
    raise UserError(
        f"{file.uri}: {' and '.join(differences)}, unlike {first.uri}; expected the same columns in all files"
    )


def check_names(names: list[str], file: SourceFile) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(
            f"{file.uri}: the column name {twice[0]!r} appears more than once; expected different names"
            + header_hint(names)
        )
    reserved = [name for name in names if name.startswith("\0")]
    if reserved:
        raise UserError(f"{file.uri}: the column name {reserved[0]!r} starts with NUL; expected another name")


def header_hint(names: list[str]) -> str:
    """Return a hint for an error message if column names look like values, so the first line may be data; else ""."""
    if not any(looks_like_value(name) for name in names):
        return ""
    return "; if the first line is data, set data.header to false and name the columns in data.columns"


def looks_like_value(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


# Columns that directories give


@dataclass(frozen=True)
class Partitions:
    """Columns given by directories, as in Hive and Spark: ``year=2020/month=1/part.parquet``.

    ``types`` maps these columns to types; ``values`` maps the URI of a file to its texts by column (``None`` if
    missing).
    """

    types: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, str | None]] = field(default_factory=dict)

    def of(self, uri: str) -> dict[str, str | None]:
        return self.values.get(uri, {})

    def beside(self, types: dict[str, str]) -> dict[str, str]:
        """Return ``types`` followed by the partition columns; a column in both keeps its entry in ``types``."""
        return {**types, **self.types, **types}


def find_partitions(source: ResolvedSource) -> Partitions:
    """Return the columns given by the directories of all files.

    Types are inferred as for text files, from all values. A file outside such directories has missing values.
    """
    keys_of = {file.uri: keys_in(source.listing.relative(file)) for file in source.files}
    names = list(dict.fromkeys(name for keys in keys_of.values() for name in keys))
    values = {uri: {name: keys.get(name) for name in names} for uri, keys in keys_of.items()} if names else {}
    config, types = source.config, {}
    for name in names:
        texts = pa.array([keys[name] for keys in values.values()], pa.string())
        declared = config.types.get(name)
        types[name] = DECLARED[declared] if declared else NumberFormat.of(config).guess(texts, 0.0)
    return Partitions(types, values)


def keys_in(path: str) -> dict[str, str | None]:
    pairs = [part.partition("=") for part in path.split("/")[:-1]]
    decoded = {unquote(name): unquote(value) for name, mark, value in pairs if name and mark}
    return {name: None if value == MISSING else value for name, value in decoded.items()}


# Columns of text


@dataclass(frozen=True)
class TypeTrial:
    """Result of converting the texts of one unit: types, failures, and a failing row by column."""

    types: dict[str, str]
    failures: dict[str, int]
    examples: dict[str, BadRow]


def infer_types(
    units: list[Unit], names: list[str], config: DataConfig, scratch: ResumableScratch
) -> tuple[dict[str, str], list[str]]:
    """Infer types of text columns in columnar files, as for CSV; return them and warnings.

    The first rows suggest a type, then the conversion of all values is tried.
    """
    if not units or not names:
        return {}, []
    first = [unit for unit in units if unit.file == units[0].file]
    types, warnings = guess_types(*sample_texts(first, names, config), config)
    guessed = {name: kind for name, kind in types.items() if kind != value_types.TEXT}
    if not guessed:
        return {}, warnings
    tried = list(scratch.map(try_types, ((unit, guessed, config) for unit in units)))
    rows = sum(unit.rows for unit in units)
    for name, kind in guessed.items():
        failures = sum(one.failures.get(name, 0) for one in tried)
        for one in tried:
            types[name] = value_types.wider_type(types[name], one.types[name]) or kind
        if failures > tolerated_share(config) * rows:
            example = next(one.examples[name] for one in tried if name in one.examples)
            warnings.append(taken_as_text(example, f"{failures:,} of {rows:,} values", kind))
            types[name] = value_types.TEXT
    return types, warnings


def sample_texts(
    units: list[Unit], names: list[str], config: DataConfig
) -> tuple[dict[str, pa.Array], str, np.ndarray]:
    """Return the first rows of a file's ``units`` as texts by column, the file, and the rows' lines.

    The sample is about as large as for CSV.
    """
    most = min(SAMPLE_ROWS, MemoryBudget(config.memory).batch_rows(len(names)))
    parts, rows = [], 0
    for unit in units:
        if rows < most:
            batch = read_first_rows(unit, names, most - rows)
            parts.append(pa.table({name: batch.column(name).cast(pa.string()) for name in names}))
            rows += batch.num_rows
    table = pa.concat_tables(parts)
    table = table.slice(0, max(1, table.num_rows * SAMPLE_BYTES // max(table.nbytes, SAMPLE_BYTES)))
    lines = np.concatenate([np.arange(unit.first_line, unit.first_line + unit.rows) for unit in units[: len(parts)]])
    return {name: table[name].combine_chunks() for name in names}, units[0].file, lines


def try_types(job: tuple[Unit, dict[str, str], DataConfig]) -> TypeTrial:
    """Convert the texts of one unit to the suggested types and count failures; runs in a worker process."""
    unit, types, config = job
    number_format = NumberFormat.of(config)
    read_as, failures, examples = dict(types), Counter[str](), dict[str, BadRow]()
    for batch, lines in read_unit(unit, list(types), MemoryBudget(config.memory)):
        for name, kind in types.items():
            texts = batch.column(name).cast(pa.string())
            values, failed = number_format.convert(texts, kind)
            read_as[name] = value_types.wider_type(read_as[name], value_types.column_type(values.type)) or kind
            rows = np.flatnonzero(failed)
            if len(rows):
                failures[name] += len(rows)
                example = BadRow(unit.file, int(lines[rows[0]]), name, f"not {kind}", texts[rows[0]].as_py())
                examples.setdefault(name, example)
    return TypeTrial(read_as, dict(failures), examples)
