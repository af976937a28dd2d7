"""Tables of columnar files: one schema for all files and their directories; types of text columns are inferred."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

import pyarrow as pa

from slipstream.shared.artifacts.resume import ResumableScratch
from slipstream.shared.errors import UserError
from slipstream.shared.source.columnar import TableInput, Unit, list_units, read_unit
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.number_formats import DECLARED, NumberFormat, cannot_become
from slipstream.shared.source.columns.readings import (
    Readings,
    count_readings,
    decide_type,
    is_counted,
    tolerated_share,
    total_readings,
    type_warning,
)
from slipstream.shared.source.config import FOLDER, DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.given_splits import folder_name
from slipstream.shared.source.memory import MemoryBudget
from slipstream.shared.source.resolved import ResolvedSource

#: Hive's directory name for rows whose partition key is missing.
MISSING = "__HIVE_DEFAULT_PARTITION__"
#: Names of indices that pandas writes without a name, and names of a first column without one.
INDEX = re.compile(r"(?i)__index_level_\d+__|unnamed: 0(\.\d+)*")
FIRST = re.compile(r"(?i)(unnamed[:_] ?\d+)?")


def open_columnar(source: ResolvedSource, scratch: ResumableScratch) -> TableInput:
    """Open Parquet or Arrow files as a table; raise ``UserError`` for bad data."""
    config, first = source.config, source.files[0]
    partitions = find_partitions(source)
    units: list[Unit] = []
    types: dict[str, str] = {}
    coded, stored_texts = set[str](), set[str]()
    indices: list[str] = []
    first_row = 0
    for file in source.files:
        schema, pieces = list_units(file, source.format, first_row)
        check_names(schema.names, file)
        indices += find_indices(schema.names, source)
        of_file = {field.name: declared_type(field, file, config) for field in schema}
        types = of_file if not types else merge_types(types, of_file, file, first, [*config.drop, *indices])
        stored_texts |= {field.name for field in schema if value_types.column_type(field.type) == value_types.TEXT}
        coded |= {field.name for field in schema if pa.types.is_dictionary(field.type)}
        units += [replace(piece, partition=partitions.of(file.uri)) for piece in pieces if piece.rows]
        first_row += sum(piece.rows for piece in pieces)
    # A dictionary marks its texts as categories.
    types = {name: value_types.NUMBER if kind == value_types.NOTHING else kind for name, kind in types.items()}
    types |= dict.fromkeys(indices, value_types.OTHER)
    texts = [
        name
        for name, kind in types.items()
        if ((kind == value_types.TEXT and name not in coded) or (kind == value_types.TIME and name in stored_texts))
        and is_counted(name, config)
    ]
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

    Types are inferred as for text files. A file outside such directories has missing values.
    """
    keys_of = {file.uri: keys_in(source.listing.relative(file)) for file in source.files}
    names = list(dict.fromkeys(name for keys in keys_of.values() for name in keys))
    values = {uri: {name: keys.get(name) for name in names} for uri, keys in keys_of.items()} if names else {}
    config, types = source.config, dict[str, str]()
    if config.split.directories:
        types[FOLDER] = value_types.TEXT
        for file in source.files:
            values.setdefault(file.uri, {})[FOLDER] = folder_name(source.listing, file)
    for name in names:
        texts = pa.array([keys[name] for keys in values.values()], pa.string())
        types[name] = (
            decide_type(name, count_readings(texts, NumberFormat.of(config)), config, 0.0)
            if is_counted(name, config)
            else DECLARED.get(config.types.get(name, ""), value_types.TEXT)
        )
    return Partitions(types, values)


def keys_in(path: str) -> dict[str, str | None]:
    pairs = [part.partition("=") for part in path.split("/")[:-1]]
    decoded = {unquote(name): unquote(value) for name, mark, value in pairs if name and mark}
    return {name: None if value == MISSING else value for name, value in decoded.items()}


# Columns of text


def infer_types(
    units: list[Unit], names: list[str], config: DataConfig, scratch: ResumableScratch
) -> tuple[dict[str, str], list[str]]:
    """Infer types of text columns in columnar files from all of their values; return them and warnings."""
    if not names:
        return {}, []
    parts = list(scratch.map(count_unit, ((unit, names, config) for unit in units)))
    return decide_types({name: total_readings([part[name] for part in parts]) for name in names}, config)


def decide_types(found: Mapping[str, Readings], config: DataConfig) -> tuple[dict[str, str], list[str]]:
    """Return the types of counted columns, and warnings."""
    types = {name: decide_type(name, each, config, tolerated_share(config)) for name, each in found.items()}
    warnings = [type_warning(name, kind, found[name], config) for name, kind in types.items()]
    return types, [warning for warning in warnings if warning]


def count_unit(job: tuple[Unit, list[str], DataConfig]) -> dict[str, Readings]:
    """Count what the texts of one unit can be read as; runs in a worker process."""
    unit, names, config = job
    number_format, budget = NumberFormat.of(config), MemoryBudget(config.memory)
    batches = list[dict[str, Readings]]()
    for batch, lines in read_unit(unit, names, budget):
        texts = {name: batch.column(name) for name in names}
        texts |= {name: each.cast(pa.string()) for name, each in texts.items() if not pa.types.is_dictionary(each.type)}
        batches.append(
            {name: count_readings(each, number_format, unit.file, name, lines) for name, each in texts.items()}
        )
    return {name: total_readings([batch[name] for batch in batches]) for name in names}
