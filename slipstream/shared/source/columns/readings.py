"""Types of text columns, decided by what all of their values can be read as.

Values are counted by class. Counts add up, so the type does not depend on the order of rows, files or machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.errors import UserError
from slipstream.shared.source.columns import times, value_types
from slipstream.shared.source.columns.number_formats import DECLARED, NumberFormat
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.quarantine import BadRow

#: Start of every text that can be read as a number, a boolean or a time.
READABLE = r"(?i)^[+-]?[.,]?\d|^[+-]?(nan|inf)|^(true|false)$"
NOT_FINITE = r"(?i)^[+-]?(nan|inf|infinity)$"
WHOLE = r"^[+-]?\d+$"
LEADING_ZERO = r"^[+-]?0\d"
#: Largest number of digits with which every integer fits int64.
DIGITS = 18
#: Number of characters from which a text that is read as ISO 8601 is not a number.
SHORTEST_TIME = 10
#: Largest number of unreadable texts that are kept for hints, and of characters of each.
EXAMPLES, CHARACTERS = 64, 60


@dataclass(frozen=True)
class Readings:
    """Numbers of present values of a column by class.

    ``whole`` and ``fraction`` are numbers, ``times`` ISO 8601. Dates with the year last are ``day_first``,
    ``month_first`` or, if both orders are possible, ``either``. ``zeros`` of the whole numbers have a leading zero, the
    first of them is ``zero``; ``narrow`` and ``wide`` are their smallest and largest numbers of digits (0: none, or
    negative numbers). ``others`` are distinct unreadable texts, and ``other`` the first value that is not a number.
    """

    present: int = 0
    whole: int = 0
    fraction: int = 0
    boolean: int = 0
    times: int = 0
    day_first: int = 0
    month_first: int = 0
    either: int = 0
    zeros: int = 0
    zero: str = ""
    narrow: int = 0
    wide: int = 0
    nested: bool = False
    others: tuple[str, ...] = ()
    other: BadRow | None = None

    @property
    def numbers(self) -> int:
        return self.whole + self.fraction

    @property
    def year_last(self) -> int:
        return self.day_first + self.month_first + self.either


COUNTS = ("present", "whole", "fraction", "boolean", "times", "day_first", "month_first", "either", "zeros")


def total_readings(parts: list[Readings]) -> Readings:
    counts = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
    return Readings(
        **counts,
        zero=next((part.zero for part in parts if part.zero), ""),
        narrow=min((part.narrow for part in parts if part.whole), default=0),
        wide=max((part.wide for part in parts), default=0),
        nested=any(part.nested for part in parts),
        others=tuple(islice(dict.fromkeys(text for part in parts for text in part.others), EXAMPLES)),
        other=next((part.other for part in parts if part.other), None),
    )


def read_as(values: pa.Array, texts: pa.Array, kind: str) -> Readings | None:
    """Return the readings of ``texts`` that were all converted to ``values``, None if they must be looked at."""
    present = len(values) - values.null_count
    if kind in value_types.NUMBERS and pa.types.is_floating(values.type):
        return Readings(present, fraction=present)
    lengths = pc.binary_length(texts)
    if values.null_count:
        lengths = pc.if_else(values.is_valid(), lengths, None)
    if kind == value_types.TIME and present and pc.min(lengths).as_py() >= SHORTEST_TIME:
        return Readings(present, times=present)
    if kind in value_types.NUMBERS and present and value_types.characters_of(values) == pc.sum(lengths).as_py():
        low, high = pc.min_max(values).as_py().values()
        narrow, wide = (len(str(end)) if end >= 0 else 0 for end in (low, high))
        return Readings(present, whole=present, narrow=narrow, wide=wide)
    return None


def count_readings(
    texts: pa.Array, number_format: NumberFormat, file: str = "", column: str = "", lines: np.ndarray | None = None
) -> Readings:
    """Count the values of a text column by class; ``lines`` are lines in ``file``."""
    if plain_texts := count_plain(texts, number_format):
        return plain_texts
    coded = value_types.with_dictionary(texts)
    distinct = value_types.clean_texts(coded.dictionary.cast(pa.string()), list(number_format.missing))
    codes = value_types.dictionary_codes(coded)
    counts = np.bincount(codes, minlength=len(distinct) + 1)[: len(distinct)]
    counts[distinct.is_null().to_numpy(zero_copy_only=False)] = 0
    classes = classify(distinct, number_format)
    found: dict[str, Any] = {name: int(counts[rows].sum()) for name, rows in classes.items()}
    plain = np.zeros(len(distinct), bool)
    plain[classes["whole"]] = plain[classes["fraction"]] = True
    whole = number_format.plain_numbers(distinct.take(pa.array(classes["whole"])))
    zeros = pc.match_substring_regex(whole, LEADING_ZERO).to_numpy(zero_copy_only=False)
    zeros &= counts[classes["whole"]] > 0
    widths = pc.if_else(pc.starts_with(whole, "-"), 0, pc.utf8_length(pc.utf8_ltrim(whole, "+")))
    limits = pc.min_max(widths.filter(pa.array(counts[classes["whole"]] > 0)))
    others = np.flatnonzero((counts > 0) & ~plain)
    unread = np.setdiff1d(others, np.concatenate([*classes.values()]))[:EXAMPLES]
    differing = np.zeros(len(distinct) + 1, bool)
    differing[others] = True
    first = np.flatnonzero(differing[codes])[:1]
    return Readings(
        present=int(counts.sum()),
        **found,
        zeros=int(counts[classes["whole"]][zeros].sum()),
        zero=whole[int(np.flatnonzero(zeros)[0])].as_py()[:CHARACTERS] if zeros.any() else "",
        narrow=limits["min"].as_py() or 0,
        wide=limits["max"].as_py() or 0,
        others=tuple(text[:CHARACTERS] for text in distinct.take(pa.array(unread)).to_pylist()),
        other=BadRow(file, int(lines[first[0]]), column, "", coded[int(first[0])].as_py()[:CHARACTERS])
        if len(first) and lines is not None
        else None,
    )


def count_plain(texts: pa.Array, number_format: NumberFormat) -> Readings | None:
    """Return the readings of texts without spaces and marks for "missing" that are all numbers or all times, or None.

    Faster than looking at every text.
    """
    if pa.types.is_dictionary(texts.type) or number_format.separated or not len(texts):
        return None
    kind = value_types.TIME if times.may_be_times(texts[:1])[0] else value_types.INTEGER
    values, failed = value_types.convert_texts(texts[:1], kind, list(number_format.missing))
    if failed.any() or values.null_count or any(map(value_types.spells_number, number_format.missing)):
        return None
    read = value_types.cast_texts(texts, kind)
    return None if read is None else read_as(read, texts, kind)


def classify(texts: pa.Array, number_format: NumberFormat) -> dict[str, np.ndarray]:
    """Return the positions of the texts of every class that occurs (int64); ``texts`` are clean and distinct."""
    left = np.flatnonzero(matching(texts, READABLE))

    def take(chosen: np.ndarray) -> np.ndarray:
        nonlocal left
        taken, left = left[chosen], left[~chosen]
        return taken

    def of_left() -> pa.Array:
        return texts.take(pa.array(left))

    plain = number_format.plain_numbers(of_left())
    whole = matching(plain, WHOLE)
    long = np.flatnonzero(whole & (pc.utf8_length(plain).to_numpy(zero_copy_only=False) > DIGITS))
    whole[long] = [fits_int64(plain[row].as_py()) for row in long]
    fraction = ~whole & (matching(plain, NumberFormat().pattern) | matching(plain, NOT_FINITE))
    numbers = whole | fraction
    is_whole = whole[numbers]
    found = take(numbers)
    classes = {"whole": found[is_whole], "fraction": found[~is_whole]}
    if not len(left):
        return classes
    classes["boolean"] = take(matching(of_left(), "(?i)^(true|false)$"))
    left = left[times.may_be_times(of_left())]
    if not len(left):
        return classes
    classes["times"] = take(read(times.parse_iso(of_left())))
    day, month = (read(times.parse_year_last(of_left(), day_first)) for day_first in (True, False))
    return classes | {"day_first": left[day & ~month], "month_first": left[month & ~day], "either": left[day & month]}


def fits_int64(text: str) -> bool:
    return -(2**63) <= int(text) < 2**63


def matching(texts: pa.Array, pattern: str) -> np.ndarray:
    return pc.fill_null(pc.match_substring_regex(texts, pattern), False).to_numpy(zero_copy_only=False)


def read(values: pa.Array) -> np.ndarray:
    return values.is_valid().to_numpy(zero_copy_only=False)


# Decisions


def tolerated_share(config: DataConfig) -> float:
    """Return the largest share of a column's present values that may contradict its inferred type (0 to 1)."""
    return min(config.quarantine_limit, 0.1)


def is_counted(name: str, config: DataConfig) -> bool:
    """Return True if the values of a text column decide how it is read: undeclared, or a date in unknown order."""
    return name not in config.drop and config.types.get(name) in (None, "date")


def decide_type(name: str, found: Readings, config: DataConfig, tolerance: float) -> str:
    """Return the type of a text column: the narrowest that all values but the share ``tolerance`` can be read as.

    Raise ``UserError`` for a column declared as date whose values do not tell whether the day or the month comes first.
    """
    if config.types.get(name) == "date":
        return declared_date(name, found, config)
    most = tolerance * found.present
    if found.nested:
        return value_types.OTHER
    if not found.present:
        return value_types.TEXT
    if found.present - found.numbers <= most:
        codes = found.zeros > most or (found.zeros and found.narrow == found.wide)
        return value_types.NUMBER if found.fraction else value_types.TEXT if codes else value_types.INTEGER
    if found.present - found.boolean <= most:
        return value_types.BOOLEAN
    if found.present - found.times <= most:
        return value_types.TIME
    fits = {
        kind: found.present - found.times - found.either - dates <= most
        for kind, dates in ((value_types.DAY_FIRST, found.day_first), (value_types.MONTH_FIRST, found.month_first))
    }
    order = order_of(found, config)
    return order if order and fits[order] else value_types.TEXT


def order_of(found: Readings, config: DataConfig) -> str:
    """Return the type of dates with the year last: by most unambiguous ones, else by ``data.dates``, else ""."""
    if found.day_first == found.month_first:
        return DECLARED[f"{config.dates} date"] if config.dates else ""
    return value_types.DAY_FIRST if found.day_first > found.month_first else value_types.MONTH_FIRST


def declared_date(name: str, found: Readings, config: DataConfig) -> str:
    if not found.year_last:
        return value_types.TIME
    if not (order := order_of(found, config)):
        raise UserError(
            f"data.types.{name}: the day or the month may come first in its dates; set data.dates to day-first or "
            "month-first"
        )
    return order


# Warnings


def type_warning(name: str, kind: str, found: Readings, config: DataConfig) -> str:
    """Return a warning about a text column whose type the user may have expected to be another, or ""."""
    if kind == value_types.INTEGER and found.zeros:
        return (
            f"column {name!r}: {found.zeros:,} of {found.present:,} whole numbers have leading zeros, such as "
            f"{found.zero!r}, which are lost; if they are codes, declare the column in data.types as category"
        )
    if kind != value_types.TEXT or name in config.types or not found.present:
        return ""
    unread = found.present - found.numbers
    if found.year_last - found.day_first - found.month_first > tolerated_share(config) * found.present:
        return (
            f"column {name!r}: its dates do not tell whether the day or the month comes first, so it is read as text; "
            "set data.dates to day-first or month-first, or declare it in data.types as text"
        )
    if priced := with_units(found):
        return (
            f"column {name!r}: looks like numbers with a currency, a percent sign or parentheses, such as "
            f"{priced!r}, and is read as text, as the units may differ; if all have the same unit, write "
            "plain numbers into the column, else declare it in data.types as text or drop it with data.drop"
        )
    if separators := settings_that_parse(found):
        return (
            f"column {name!r}: looks like numbers with separators, such as {found.others[0]!r}, "
            f"and is read as text; if they are numbers, set {' or '.join(separators)}, else declare it in "
            "data.types as text"
        )
    if found.other and 0 < 2 * unread < found.present:
        return (
            f"column {name!r}: {unread:,} of {found.present:,} values are not {value_types.NUMBER} (the first is "
            f"{found.other.raw!r} in {found.other.file}, line {found.other.line}), so it is read as text; if they mean "
            "missing, add them to data.missing"
        )
    return ""


def settings_that_parse(found: Readings) -> list[str]:
    """Return the settings, in words, with which most texts of a column would be numbers; empty if there are none."""
    if 2 * (found.present - found.numbers) <= found.present:
        return []
    odd = pa.array(found.others, pa.string())
    shares = {}
    for decimal, thousands in ((".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (".", "_")):
        plain = NumberFormat(decimal, thousands).plain_numbers(odd)
        settings = {"decimal": decimal if decimal != "." else "", "thousands": thousands}
        words = " and ".join(f'data.{name} to "{mark}"' for name, mark in settings.items() if mark)
        shares[words] = np.mean(matching(plain, NumberFormat().pattern)) if len(odd) else 0.0
    best = max(shares.values())
    fitting = [words for words, share in shares.items() if share == best] if best > 0.5 else []
    return [words for words in fitting if not any(other in words for other in fitting if other != words)]


#: Currencies and percent signs, before or after a number.
UNIT = r"(?:[\p{Sc}%‰]|\b(?:USD|EUR|GBP|CHF|JPY|CNY|INR)\b)"
#: Number with such a unit or, as accountants write losses, in parentheses.
WITH_UNIT = rf"^(?:[+-]?\s*{UNIT}\s*[+-]?DIGITS|[+-]?DIGITS\s*{UNIT}|\(\s*{UNIT}?\s*DIGITS\s*{UNIT}?\s*\))$".replace(
    "DIGITS", r"[.,]?\d[\d.,'_ \x{00a0}\x{202f}]*"
)


def with_units(found: Readings) -> str:
    """Return the first number with a currency, a percent sign or parentheses.

    The result is "" unless most texts are numbers and some have such a mark.
    """
    odd = pa.array(found.others, pa.string())
    marked = matching(odd, WITH_UNIT)
    plain = matching(odd, r"^[+-]?[.,]?\d[\d.,'_ ]*$")
    unread = found.present - found.numbers
    if not marked.any() or 2 * (found.numbers + np.mean(marked | plain) * unread) <= found.present:
        return ""
    return found.others[int(np.flatnonzero(marked)[0])]
