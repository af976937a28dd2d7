"""Raw columns of a table and their encoding as model inputs, from ``statistics.json``.

The file holds :class:`slipstream.shared.source.columns.transform.Transform`. Only the fields that an ONNX graph can
apply are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream.shared.source.columns.number_formats import NumberFormat, missing_marks
from slipstream.shared.source.columns.spelling import rule_in_force
from slipstream.shared.source.columns.value_types import ARROW, TEXT, TIME, TIMES, as_numbers

#: Codes of a categorical input: missing, unseen, and the vocabulary's first text.
MISSING, UNSEEN, FIRST = 0, 1, 2


@dataclass(frozen=True)
class NumericInput:
    """Numeric input ``(f(x) - mean) / std``; f is "linear", or "log" with its ``scale``.

    x is the column or, for times, its ``part``: hour, weekday or month.
    """

    name: str
    mean: float
    std: float
    curve: str
    scale: float
    part: str
    indicator: bool


@dataclass(frozen=True)
class CategoryInput:
    """Categorical input: the index of a text in the vocabulary, see ``FIRST``; ``spelling`` is the rule of both."""

    name: str
    vocabulary: tuple[str, ...]
    spelling: str = ""

    @property
    def rule(self) -> str:
        return rule_in_force(self.spelling, self.vocabulary)


@dataclass(frozen=True)
class RawColumns:
    """Encoding of raw columns as the model inputs ``numeric`` and ``categorical``; ``types`` are by name.

    Texts are strings; all other columns are float64 with NaN for missing.
    """

    types: dict[str, str]
    missing: tuple[str, ...]
    numbers: tuple[NumericInput, ...]
    categories: tuple[CategoryInput, ...]
    #: Numbers, and times in seconds, that mean "missing", by column.
    marks: dict[str, list[float]] = field(default_factory=dict)

    @property
    def numeric(self) -> list[str]:
        return list(dict.fromkeys(number.name for number in self.numbers))

    @property
    def indicators(self) -> list[str]:
        return [number.name for number in self.numbers if number.indicator]

    @property
    def mark(self) -> str:
        """Text that stands for a missing value in samples."""
        return "" if "" in self.missing or not self.missing else self.missing[0]


def read_columns(statistics: Mapping[str, Any]) -> RawColumns | str:
    """Return the columns of ``statistics.json``, or the reason why ONNX cannot encode them."""
    if "types" not in statistics:
        return "the data are not a table of typed columns"
    if statistics["documents"]:
        named = ", ".join(statistics["documents"])
        return f"columns of documents ({named}): ONNX can neither normalise Unicode (NFKC) nor compute XXH3"
    return raw_columns(statistics)


def raw_columns(statistics: Mapping[str, Any]) -> RawColumns:
    """Return the columns of a table that become numbers or categories."""
    numbers = tuple(NumericInput(**column) for column in statistics["numeric"])
    categories = tuple(CategoryInput(**{**c, "vocabulary": tuple(c["vocabulary"])}) for c in statistics["categorical"])
    used = dict.fromkeys([n.name for n in numbers] + [c.name for c in categories])
    types = {name: statistics["types"][name] for name in used}
    missing = tuple(statistics["missing"])
    notation = NumberFormat(statistics.get("decimal", "."), statistics.get("thousands", ""), missing)
    marks = {name: marked_numbers(notation, kind) for name, kind in types.items() if kind != TEXT}
    types |= {name: TIME for name, kind in types.items() if kind in TIMES}
    return RawColumns(types, missing, numbers, categories, marks)


def marked_numbers(notation: NumberFormat, kind: str) -> list[float]:
    """Return the values of ``data.missing`` that a column of this type can hold, as numbers or seconds."""
    marks = missing_marks(notation, kind)
    return as_numbers(pa.array(marks, ARROW[kind])).tolist() if kind in TIMES else np.array(marks, np.float64).tolist()
