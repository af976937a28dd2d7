"""Columns that directories give: ``year=2020/month=1/part.parquet``, as Hive, Spark and others lay out a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import unquote

import pyarrow as pa

from slipstream.prepare.columns.number_formats import DECLARED, NumberFormat
from slipstream.prepare.config import DataConfig

#: What Hive calls the directory of the rows in which the key is missing.
MISSING = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Partitions:
    """The types of these columns, and their values (texts, ``None`` for missing) by the URI of the file."""

    types: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, str | None]] = field(default_factory=dict)

    def of(self, uri: str) -> dict[str, str | None]:
        return self.values.get(uri, {})

    def beside(self, types: dict[str, str]) -> dict[str, str]:
        """These columns after those of the files, whose types count where both have one."""
        return {**types, **self.types, **types}


def find_partitions(paths: Iterable[tuple[str, str]], config: DataConfig) -> Partitions:
    """Of the files, by their paths below the directory that was named and their URIs.

    The types are worked out over all directories, as for text in a file; a file outside them has no value.
    """
    found = {uri: keys_in(path) for path, uri in paths}
    names = list(dict.fromkeys(name for keys in found.values() for name in keys))
    values = {uri: {name: keys.get(name) for name in names} for uri, keys in found.items()} if names else {}
    number_format, types = NumberFormat.of(config), {}
    for name in names:
        texts = pa.array([keys[name] for keys in values.values()], pa.string())
        types[name] = DECLARED[config.types[name]] if name in config.types else number_format.guess(texts, 0.0)
    return Partitions(types, values)


def keys_in(path: str) -> dict[str, str | None]:
    """The keys in the directories of a path."""
    pairs = [part.partition("=") for part in path.split("/")[:-1]]
    decoded = {unquote(name): unquote(value) for name, mark, value in pairs if name and mark}
    return {name: None if value == MISSING else value for name, value in decoded.items()}
