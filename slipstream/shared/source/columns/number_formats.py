"""Notations of values: numbers with separators, yes and no, and columns with declared types."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.source.columns import value_types
from slipstream.shared.source.config import DataConfig

#: Types in ``data.types``, and the internal type as which each is read.
DECLARED = {
    "number": value_types.NUMBER,
    "date": value_types.TIME,
    "day-first date": value_types.DAY_FIRST,
    "month-first date": value_types.MONTH_FIRST,
    "boolean": value_types.BOOLEAN,
    "text": value_types.TEXT,
    "category": value_types.TEXT,
    "document": value_types.TEXT,
}
TRUE, FALSE = ("yes", "y", "t", "on"), ("no", "n", "f", "off")
#: Allowed casts between other types than text. Text can be read as any type, and all but nested values can become text.
CASTS = {
    (value_types.BOOLEAN, value_types.NUMBER),
    (value_types.INTEGER, value_types.NUMBER),
    (value_types.INTEGER, value_types.BOOLEAN),
    (value_types.NUMBER, value_types.BOOLEAN),
    *((value_types.TIME, kind) for kind in value_types.TIMES),
}


@dataclass(frozen=True)
class NumberFormat:
    """Notation of numbers: decimal mark, thousands separator ("" for none) and marks for "missing"."""

    decimal: str = "."
    thousands: str = ""
    missing: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DataConfig) -> NumberFormat:
        return cls(config.decimal, config.thousands, tuple(config.missing))

    @property
    def pattern(self) -> str:
        """Regular expression of a number, with optional groups of three digits if there is a thousands separator."""
        mark = re.escape(self.decimal)
        grouped = rf"|\d{{1,3}}({re.escape(self.thousands)}\d{{3}})+" if self.thousands else ""
        return rf"^[+-]?((\d+{grouped})({mark}\d*)?|{mark}\d+)([eE][+-]?\d+)?$"

    def convert(self, texts: pa.Array, kind: str) -> tuple[pa.Array, np.ndarray]:
        """Convert as :func:`value_types.convert_texts` does, from texts in this notation, such as 1.234,5 and yes."""
        values, failed = value_types.convert_texts(self.normalise(texts, kind), kind, list(self.missing))
        return self.without_marks(values, kind), failed

    def without_marks(self, column: pa.Array, kind: str) -> pa.Array:
        """Return a column of the type ``kind`` with null for values that equal a mark for "missing".

        The mark "-999" covers -999 and -999.0. Texts are unchanged.
        """
        for value in missing_marks(self, kind):
            try:
                marked = pc.equal(column, scalar_of(value, column.type))
            except pa.ArrowInvalid:
                continue  # the type cannot hold the mark
            if pc.any(marked).as_py():
                column = pc.if_else(marked, None, column)
        return column

    @property
    def separated(self) -> bool:
        return self.decimal != "." or bool(self.thousands)

    def normalise(self, texts: pa.Array, kind: str) -> pa.Array:
        """Rewrite texts for :func:`value_types.convert_texts`; numbers in another notation become unreadable."""
        if kind in value_types.NUMBERS:
            return self.plain_numbers(value_types.clean_texts(texts, list(self.missing))) if self.separated else texts
        if kind == value_types.BOOLEAN:
            lower = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
            texts = pc.if_else(pc.is_in(lower, pa.array([*TRUE, f"1{self.decimal}0"])), "true", texts)
            return pc.if_else(pc.is_in(lower, pa.array([*FALSE, f"0{self.decimal}0"])), "false", texts)
        return texts

    def plain_numbers(self, texts: pa.Array) -> pa.Array:
        """Rewrite numbers in clean texts without separators and with a point; other texts become unreadable."""
        if not self.separated:
            return texts
        if self.thousands == " ":
            texts = pc.replace_substring_regex(texts, "[\u00a0\u202f]", " ")
        matching = pc.match_substring_regex(texts, self.pattern)
        plain = pc.replace_substring(texts, self.thousands, "") if self.thousands else texts
        plain = pc.replace_substring(plain, self.decimal, ".")
        return pc.if_else(matching, plain, pc.replace_substring(texts, ".", "\0"))


@cache
def missing_marks(number_format: NumberFormat, kind: str) -> list[object]:
    """Return the marks for "missing" that can be read as ``kind``, as values of that type."""
    if kind in (value_types.TEXT, value_types.OTHER):
        return []
    marks = pa.array(number_format.missing, pa.string())
    if kind in value_types.TIMES:
        # 9999 is not a year.
        marks = pa.array([mark for mark in number_format.missing if not value_types.spells_number(mark)], pa.string())
    read_as = value_types.NUMBER if kind in value_types.NUMBERS else kind
    plain = replace(number_format, missing=()).normalise(marks, read_as)
    found = value_types.convert_texts(plain, read_as, [])[0]
    if kind in value_types.TIMES:
        return [value for value in found if value.is_valid]  # Python knows no times before the year 1
    values = found.to_pylist()
    if read_as == value_types.NUMBER:
        # All digits, as integer and decimal columns may hold them.
        spelled = [(text, value) for text, value in zip(plain.to_pylist(), values, strict=True) if value is not None]
        return [Decimal(text.strip()) if math.isfinite(value) else value for text, value in spelled if value == value]
    return [value for value in values if value is not None]


def scalar_of(value: object, kind: pa.DataType) -> pa.Scalar:
    """Return a mark for a missing value, such as -999, as an Arrow scalar of the type ``kind``.

    Raises ``pa.ArrowInvalid`` if the type cannot hold it.
    """
    if isinstance(value, pa.Scalar):
        return value.cast(kind)
    if isinstance(value, Decimal):
        value = float(value) if pa.types.is_floating(kind) else Decimal(format(value, "f"))
    return pa.scalar(value).cast(kind)


def cannot_become(stored: str, kind: str) -> bool:
    if stored == value_types.NOTHING:
        return False
    if stored == kind or value_types.TEXT in (stored, kind):
        return stored == value_types.OTHER
    return (stored, kind) not in CASTS


def retype_column(column: pa.Array, kind: str, number_format: NumberFormat) -> tuple[pa.Array, np.ndarray]:
    """Return a column as ``kind``, and which values cannot be converted (bool ``[rows]``); these are null."""
    if kind != value_types.TEXT and value_types.column_type(column.type) == value_types.TEXT:
        return number_format.convert(column.cast(pa.string()), kind)
    values, failed = cast_typed(column, kind)
    return number_format.without_marks(values, kind), failed


def cast_typed(column: pa.Array, kind: str) -> tuple[pa.Array, np.ndarray]:
    """Convert as :func:`retype_column` does, for columns that are not text or become text."""
    none = np.zeros(len(column), bool)
    stored = value_types.column_type(column.type)
    if stored == kind or (stored, kind) == (value_types.INTEGER, value_types.NUMBER) or kind in value_types.TIMES:
        return column, none
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    column = value_types.nan_as_null(column)
    if kind == value_types.TEXT:
        return column.cast(pa.string()), none
    if kind == value_types.BOOLEAN:
        readable = pc.is_in(column, pa.array([0, 1], column.type))
        failed = pc.and_(pc.is_valid(column), pc.invert(readable)).to_numpy(zero_copy_only=False)
        return pc.if_else(readable, pc.equal(column, pa.scalar(1, column.type)), None), failed
    return column.cast(pa.float64()), none
