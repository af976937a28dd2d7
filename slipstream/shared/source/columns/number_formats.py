"""Notations of values: numbers with separators, yes and no, and columns with declared types."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.source.columns import value_types
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.quarantine import BadRow

#: Types in ``data.types``, and the internal type as which each is read.
DECLARED = {
    "number": value_types.NUMBER,
    "date": value_types.TIME,
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

    def guess(self, texts: pa.Array, tolerance: float) -> str:
        """Infer the type as :func:`value_types.guess_type` does, from texts in this notation."""
        kind = value_types.guess_type(self.normalise(texts, value_types.NUMBER), list(self.missing), tolerance)
        if kind in value_types.NUMBERS or not self.separated:
            return kind
        # Respelling numbers would spoil times with fractions of a second.
        kind = value_types.guess_type(texts, list(self.missing), tolerance)
        return value_types.TEXT if kind in value_types.NUMBERS else kind

    @property
    def separated(self) -> bool:
        return self.decimal != "." or bool(self.thousands)

    def normalise(self, texts: pa.Array, kind: str) -> pa.Array:
        """Rewrite texts for :func:`value_types.convert_texts`; numbers in another notation become unreadable."""
        if kind in value_types.NUMBERS and self.separated:
            return self._plain_numbers(value_types.clean_texts(texts, list(self.missing)))
        if kind == value_types.BOOLEAN:
            lower = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
            texts = pc.if_else(pc.is_in(lower, pa.array([*TRUE, f"1{self.decimal}0"])), "true", texts)
            return pc.if_else(pc.is_in(lower, pa.array([*FALSE, f"0{self.decimal}0"])), "false", texts)
        return texts

    def _plain_numbers(self, texts: pa.Array) -> pa.Array:
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
    if kind == value_types.TIME:
        # 9999 is not a year.
        marks = pa.array([mark for mark in number_format.missing if not value_types.spells_number(mark)], pa.string())
    read_as = value_types.NUMBER if kind in value_types.NUMBERS else kind
    plain = replace(number_format, missing=()).normalise(marks, read_as)
    values = value_types.convert_texts(plain, read_as, [])[0].to_pylist()
    if read_as == value_types.NUMBER:
        # All digits, as integer and decimal columns may hold them.
        spelled = [(text, value) for text, value in zip(plain.to_pylist(), values, strict=True) if value is not None]
        return [Decimal(text.strip()) if math.isfinite(value) else value for text, value in spelled if value == value]
    return [value for value in values if value is not None]


def scalar_of(value: object, kind: pa.DataType) -> pa.Scalar:
    """Return a mark for a missing value, such as -999, as an Arrow scalar of the type ``kind``.

    Raises ``pa.ArrowInvalid`` if the type cannot hold it.
    """
    if isinstance(value, Decimal):
        value = float(value) if pa.types.is_floating(kind) else Decimal(format(value, "f"))
    return pa.scalar(value).cast(kind)


def settings_that_parse(texts: pa.Array, missing: list[str]) -> list[str]:
    """Return the settings, in words, with which most texts of a column would be numbers; empty if there are none."""
    cleaned = value_types.clean_texts(texts, missing).drop_null()
    odd = cleaned.filter(pc.invert(pc.match_substring_regex(cleaned, NumberFormat().pattern)))
    if 2 * len(odd) <= len(cleaned):
        return []
    shares = {}
    for decimal, thousands in ((".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (".", "_")):
        number_format = NumberFormat(decimal, thousands)
        read = pc.match_substring_regex(number_format.normalise(odd, value_types.NUMBER), NumberFormat().pattern)
        settings = {"decimal": decimal if decimal != "." else "", "thousands": thousands}
        words = " and ".join(f'data.{name} to "{mark}"' for name, mark in settings.items() if mark)
        shares[words] = pc.mean(read).as_py()
    best = max(shares.values())
    fitting = [words for words, share in shares.items() if share == best] if best > 0.5 else []
    return [words for words in fitting if not any(other in words for other in fitting if other != words)]


#: Currencies and percent signs, before or after a number.
UNIT = r"(?:[\p{Sc}%‰]|\b(?:USD|EUR|GBP|CHF|JPY|CNY|INR)\b)"
#: Number with such a unit or, as accountants write losses, in parentheses.
WITH_UNIT = rf"^(?:[+-]?\s*{UNIT}\s*[+-]?DIGITS|[+-]?DIGITS\s*{UNIT}|\(\s*{UNIT}?\s*DIGITS\s*{UNIT}?\s*\))$".replace(
    "DIGITS", r"[.,]?\d[\d.,'_ \x{00a0}\x{202f}]*"
)


def with_units(texts: pa.Array, missing: list[str]) -> str:
    """Return the first number with a currency, a percent sign or parentheses.

    The result is "" unless most texts are numbers and some have such a mark.
    """
    cleaned = value_types.clean_texts(texts, missing).drop_null()
    marked = pc.match_substring_regex(cleaned, WITH_UNIT)
    plain = pc.match_substring_regex(cleaned, r"^[+-]?[.,]?\d[\d.,'_ ]*$")
    if not pc.any(marked).as_py() or 2 * pc.sum(pc.or_(marked, plain)).as_py() <= len(cleaned):
        return ""
    return str(cleaned.filter(marked)[0].as_py())


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
    if stored == kind or (stored, kind) == (value_types.INTEGER, value_types.NUMBER):
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


def guess_types(
    columns: Mapping[str, pa.Array], file: str, lines: np.ndarray, config: DataConfig
) -> tuple[dict[str, str], list[str]]:
    """Infer the type of every column from its first rows; warn of text columns that are mostly numbers.

    ``columns`` hold these rows as texts; ``lines`` are their lines in ``file``.
    """
    types, warnings = {}, []
    number_format = NumberFormat.of(config)
    for name, texts in columns.items():
        if name in config.types:
            types[name] = DECLARED[config.types[name]]
            continue
        types[name] = number_format.guess(texts, tolerated_share(config))
        if types[name] != value_types.TEXT:
            continue
        if priced := with_units(texts, config.missing):
            warnings.append(
                f"column {name!r}: looks like numbers with a currency, a percent sign or parentheses, such as "
                f"{priced[:60]!r}, and is read as text, as the units may differ; if all have the same unit, write "
                "plain numbers into the column, else declare it in data.types as text or drop it with data.drop"
            )
            continue
        failed = value_types.mostly_numbers(number_format.normalise(texts, value_types.NUMBER), config.missing)
        if separators := settings_that_parse(texts, config.missing):
            warnings.append(
                f"column {name!r}: looks like numbers with separators, such as {texts.drop_null()[0].as_py()[:60]!r}, "
                f"and is read as text; if they are numbers, set {' or '.join(separators)}, else declare it in "
                "data.types as text"
            )
        elif failed is not None and failed.any():
            row = int(np.flatnonzero(failed)[0])
            example = BadRow(file, int(lines[row]), name, "", texts[row].as_py())
            share = f"{np.count_nonzero(failed):,} of the first {len(failed):,} values"
            warnings.append(taken_as_text(example, share, value_types.NUMBER))
    return types, warnings


def tolerated_share(config: DataConfig) -> float:
    """Return the largest share of unreadable values (0 to 1) with which a column is not read as text."""
    return min(config.quarantine_limit, 0.1)


def taken_as_text(example: BadRow, share: str, kind: str) -> str:
    return (
        f"column {example.column!r}: {share} are not {kind} (the first is {example.raw[:60]!r} in {example.file}, "
        f"line {example.line}), so it is read as text; if they mean missing, add them to data.missing"
    )
