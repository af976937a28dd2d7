"""The raw columns of a table and how they become a model's inputs, as ``statistics.json`` has it.

The file is :class:`slipstream.source.columns.transform.Transform` as JSON. Only what an ONNX graph can express is
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The types of raw columns; all but texts are float64, NaN where missing.
TEXT, TIME, BOOLEAN, INTEGER = "text", "time", "boolean", "integer"
#: Codes of a categorical input: missing, not in the vocabulary, and that of the vocabulary's first text.
MISSING, UNSEEN, FIRST = 0, 1, 2


@dataclass(frozen=True)
class Number:
    """A numeric input: ``(f(part of column) - mean) / std``, f being "linear" or "log" with its ``scale``."""

    name: str
    mean: float
    std: float
    curve: str
    scale: float
    part: str
    indicator: bool


@dataclass(frozen=True)
class Category:
    """A categorical input: the code of a text."""

    name: str
    vocabulary: tuple[str, ...]


@dataclass(frozen=True)
class RawColumns:
    """How typed raw columns become the inputs ``numeric`` and ``categorical``. ``types`` are those of the columns."""

    types: dict[str, str]
    missing: tuple[str, ...]
    numbers: tuple[Number, ...]
    categories: tuple[Category, ...]

    @property
    def numeric(self) -> list[str]:
        """The columns that become numbers, each once."""
        return list(dict.fromkeys(number.name for number in self.numbers))

    @property
    def indicators(self) -> list[str]:
        return [number.name for number in self.numbers if number.indicator]

    @property
    def mark(self) -> str:
        """How a missing text is written."""
        return "" if "" in self.missing or not self.missing else self.missing[0]


def read_columns(statistics: Mapping[str, Any]) -> RawColumns | str:
    """The columns of ``statistics.json``, or in words why a graph cannot start from them."""
    if "types" not in statistics:
        return "the data is no table of typed columns"
    if statistics["documents"]:
        named = ", ".join(statistics["documents"])
        return f"columns of documents ({named}): ONNX can neither fold Unicode (NFKC) nor compute XXH3"
    return columns_of(statistics)


def columns_of(statistics: Mapping[str, Any]) -> RawColumns:
    """The columns of a table that become numbers and categories."""
    numbers = tuple(Number(**column) for column in statistics["numeric"])
    categories = tuple(Category(c["name"], tuple(c["vocabulary"])) for c in statistics["categorical"])
    used = dict.fromkeys([n.name for n in numbers] + [c.name for c in categories])
    types = {name: statistics["types"][name] for name in used}
    return RawColumns(types, tuple(statistics["missing"]), numbers, categories)
