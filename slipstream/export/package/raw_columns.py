"""Raw columns of a table and their encoding as model inputs, from ``statistics.json``.

The file is :class:`slipstream.source.columns.transform.Transform` as JSON. Only the parts that an ONNX graph can
express are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Types of raw columns; all but texts are float64, NaN where missing.
TEXT, TIME, BOOLEAN, INTEGER = "text", "time", "boolean", "integer"
#: Codes of a categorical input: missing, unseen, and the vocabulary's first text.
MISSING, UNSEEN, FIRST = 0, 1, 2


@dataclass(frozen=True)
class Number:
    """Numeric input ``(f(part of column) - mean) / std``; f is "linear" or "log" with its ``scale``."""

    name: str
    mean: float
    std: float
    curve: str
    scale: float
    part: str
    indicator: bool


@dataclass(frozen=True)
class Category:
    """Categorical input: the code of a text."""

    name: str
    vocabulary: tuple[str, ...]


@dataclass(frozen=True)
class RawColumns:
    """Encoding of raw columns, by name in ``types``, as the inputs ``numeric`` and ``categorical``."""

    types: dict[str, str]
    missing: tuple[str, ...]
    numbers: tuple[Number, ...]
    categories: tuple[Category, ...]

    @property
    def numeric(self) -> list[str]:
        """Columns that become numbers, without duplicates."""
        return list(dict.fromkeys(number.name for number in self.numbers))

    @property
    def indicators(self) -> list[str]:
        return [number.name for number in self.numbers if number.indicator]

    @property
    def mark(self) -> str:
        """Text that marks a missing value."""
        return "" if "" in self.missing or not self.missing else self.missing[0]


def read_columns(statistics: Mapping[str, Any]) -> RawColumns | str:
    """Return the columns of ``statistics.json``, or the reason why a graph cannot encode them."""
    if "types" not in statistics:
        return "the data are not a table of typed columns"
    if statistics["documents"]:
        named = ", ".join(statistics["documents"])
        return f"columns of documents ({named}): ONNX can neither normalise Unicode (NFKC) nor compute XXH3"
    return columns_of(statistics)


def columns_of(statistics: Mapping[str, Any]) -> RawColumns:
    """Return the columns of a table that become numbers and categories."""
    numbers = tuple(Number(**column) for column in statistics["numeric"])
    categories = tuple(Category(c["name"], tuple(c["vocabulary"])) for c in statistics["categorical"])
    used = dict.fromkeys([n.name for n in numbers] + [c.name for c in categories])
    types = {name: statistics["types"][name] for name in used}
    return RawColumns(types, tuple(statistics["missing"]), numbers, categories)
