"""Types of column values, and conversion of texts to them."""

from __future__ import annotations

import math
from decimal import Decimal
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.shared.source.columns import times

INTEGER, NUMBER, BOOLEAN, TIME, TEXT, OTHER = "integer", "number", "boolean", "time", "text", "other"
#: Times in text whose date may have the year last; other texts are read as ``TIME``.
DAY_FIRST, MONTH_FIRST = "day-first date", "month-first date"
TIMES = (TIME, DAY_FIRST, MONTH_FIRST)
NUMBERS = (INTEGER, NUMBER)
#: Type of a column without values (Arrow's null); the column's type in other files takes precedence.
NOTHING = "nothing"
ARROW = {
    INTEGER: pa.int64(),
    NUMBER: pa.float64(),
    BOOLEAN: pa.bool_(),
    **dict.fromkeys(TIMES, times.MICROSECONDS),
    TEXT: pa.string(),
}


#: Largest number of texts that are parsed one by one if Arrow cannot read them all as numbers.
LOOKED_AT = 32


def column_type(kind: pa.DataType) -> str:
    """Return the type of an Arrow column: one of the constants of this module."""
    kind = inner_type(kind)
    if pa.types.is_boolean(kind):
        return BOOLEAN
    if pa.types.is_integer(kind):
        return INTEGER
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return NUMBER
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return TIME
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return TEXT
    return NOTHING if pa.types.is_null(kind) else OTHER


def inner_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values inside a dictionary, run-end encoded or extension type."""
    while True:
        if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:
            return kind


#: Types for which Arrow lacks required kernels, and a type for each that holds the same values.
SUBSTITUTES = {
    pa.float16().id: lambda _: pa.float32(),
    pa.decimal32(1).id: lambda kind: pa.decimal128(kind.precision, kind.scale),
    pa.decimal64(1).id: lambda kind: pa.decimal128(kind.precision, kind.scale),
    pa.string_view().id: lambda _: pa.string(),
    pa.binary_view().id: lambda _: pa.binary(),
    # For an unknown zone, which only affects display.
    pa.timestamp("s").id: lambda kind: pa.timestamp(kind.unit, "UTC"),
}


def has_values(kind: pa.DataType) -> bool:
    """Return True if values of this type are comparable: not nested, no interval of months and days."""
    inner = inner_type(kind)
    return not (pa.types.is_nested(inner) or pa.types.is_interval(inner))


def is_simple(kind: pa.DataType) -> bool:
    """Return True if :func:`simplify_column` does not change columns of this type."""
    if pa.types.is_dictionary(kind):
        inner, index = kind.value_type, kind.index_type
        return index in (pa.int32(), pa.int64()) and column_type(inner) == TEXT and is_simple(inner)
    if pa.types.is_timestamp(kind):
        return not kind.tz or is_known_zone(kind.tz)
    wrapped = inner_type(kind) is not kind
    return not (wrapped or pa.types.is_null(kind) or kind.id in SUBSTITUTES) and has_values(kind)


@cache
def is_known_zone(zone: str) -> bool:
    try:
        pa.array([0], pa.timestamp("s", zone)).cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def simplify_column(column: pa.Array) -> pa.Array:
    """Return the column in a type that all later steps support: plain, or a dictionary of texts.

    Values that cannot be compared (:func:`has_values`) become null.
    """
    kind = column.type
    if is_simple(kind):
        return column
    if not has_values(kind):
        return pa.nulls(len(column), pa.binary())
    if isinstance(kind, pa.BaseExtensionType):
        return simplify_column(column.storage)
    if pa.types.is_run_end_encoded(kind):
        # Arrow decodes few run-end encoded types.
        rows = np.arange(column.offset, column.offset + len(column))
        return simplify_column(column.values).take(pa.array(np.searchsorted(column.run_ends, rows, side="right")))
    if pa.types.is_dictionary(kind):
        values = simplify_column(column.dictionary)
        if column_type(kind) != TEXT or pa.types.is_dictionary(values.type):
            return simplify_column(values.take(column.indices))
        return pa.DictionaryArray.from_arrays(column.indices.cast(pa.int64()), values)
    return column.cast(pa.float64() if pa.types.is_null(kind) else SUBSTITUTES[kind.id](kind))


def wider_type(a: str, b: str) -> str | None:
    """Return the type that holds the values of both ``a`` and ``b``; ``None`` if only text does."""
    if a == b or b == NOTHING:
        return a
    if a == NOTHING:
        return b
    return NUMBER if {a, b} == {INTEGER, NUMBER} else None


def clean_texts(texts: pa.Array, missing: list[str]) -> pa.Array:
    """Return the texts without surrounding spaces, and null for the marks ``missing``."""
    trimmed = pc.utf8_trim_whitespace(texts)
    marked = pc.is_in(trimmed, value_set=pa.array(missing, trimmed.type)) if missing else None
    if marked is None or not pc.any(marked).as_py():
        return trimmed
    return pc.if_else(marked, pa.scalar(None, trimmed.type), trimmed)


def convert_texts(texts: pa.Array, kind: str, missing: list[str]) -> tuple[pa.Array, np.ndarray]:
    """Return texts as ``kind``, and which values cannot be converted (bool ``[rows]``); these are null.

    Integers become numbers if some have fractions. Texts become a dictionary array.
    """
    none = np.zeros(len(texts), bool)
    if kind == TEXT:
        coded = texts.dictionary_encode()
        return pa.DictionaryArray.from_arrays(coded.indices, clean_texts(coded.dictionary, missing)), none
    # Most columns need no cleaning, which takes longer than reading the numbers; but a mark such as -999 would be read.
    read = None if any(map(spells_number, missing)) else cast_texts(texts, kind)
    if read is not None:
        return read, none
    cleaned = clean_texts(texts, missing)
    read = cast_texts(cleaned, kind)
    if read is not None:
        return read, none
    values = one_by_one(cleaned, kind)
    failed = pc.and_(cleaned.is_valid(), values.is_null())
    if kind == INTEGER:
        # Large integers keep their digits next to unreadable values.
        values = cast_texts(pc.if_else(failed, None, cleaned), INTEGER)
    return values, failed.to_numpy(zero_copy_only=False)


def cast_texts(texts: pa.Array, kind: str) -> pa.Array | None:
    """Return all texts as ``kind``, integers as numbers if necessary; ``None`` if any text cannot be read."""
    if kind in TIMES:
        read = times.parse_times(texts, None if kind == TIME else kind == DAY_FIRST)
        return read if read.null_count == texts.null_count else None
    for target in (INTEGER, NUMBER) if kind == INTEGER else (kind,):
        try:
            read = texts.cast(ARROW[target])
        except pa.ArrowInvalid:
            continue
        if target != INTEGER or is_decimal(read, texts):
            return read
    return None


def is_decimal(values: pa.Array, texts: pa.Array) -> bool:
    """Return False if Arrow has read some of the ``texts`` as hexadecimal integers, such as 0x1F."""
    return characters_of(values) == pc.sum(pc.binary_length(texts)).as_py() or not pc.any(
        pc.match_substring(texts, "x", ignore_case=True)
    )


def characters_of(integers: pa.Array) -> int | None:
    """Return the number of characters of the integers without leading zeros; None without any."""
    low, high = pc.min_max(integers).as_py().values()
    if low is None:
        return None
    numbers = integers.drop_null().to_numpy()
    sizes, most = (np.abs(numbers), max(-low, high)) if low < 0 else (numbers, high)
    signs = np.count_nonzero(numbers < 0) if low < 0 else 0
    steps = [10**digits for digits in range(1, len(str(most)))]
    longer = (len(numbers) if low >= step else np.count_nonzero(sizes >= step) for step in steps)
    return len(numbers) + int(signs) + sum(map(int, longer))


@cache
def spells_number(text: str) -> bool:
    read = cast_texts(pa.array([text]), NUMBER)
    return read is not None and not math.isnan(read[0].as_py())


def one_by_one(cleaned: pa.Array, kind: str) -> pa.Array:
    """Return the texts as ``kind``, null where that fails."""
    if kind == BOOLEAN:
        values = {"true": True, "false": False}
        return pa.array([values.get(str(text).lower()) for text in cleaned.to_pylist()], pa.bool_())
    if kind in TIMES:
        return times.parse_times(cleaned, None if kind == TIME else kind == DAY_FIRST)
    return as_far_as_read(cleaned)


def as_far_as_read(texts: pa.Array) -> pa.Array:
    """Return texts as float64, null where they are not numbers.

    Failures are found by bisection, down to few values.
    """
    read = cast_texts(texts, NUMBER)
    if read is not None:
        return read
    if len(texts) <= LOOKED_AT:
        return pa.array(map(parse_number, texts.to_pylist()), pa.float64(), size=len(texts))
    half = len(texts) // 2
    return pa.concat_arrays([as_far_as_read(texts[:half]), as_far_as_read(texts[half:])])


def parse_number(text: str | None) -> float | None:
    """Parse a number, including forms such as +5 or .5 that Arrow refuses; return ``None`` if it is not a number."""
    if text is None or "_" in text or not text.isascii():
        return None  # Python would read 1_000, and the digits of other scripts
    try:
        return float(text)
    except ValueError:
        return None


def as_numbers(column: pa.Array) -> np.ndarray:
    """Return numbers, booleans or times as float64 ``[rows]``: NaN where missing, times in seconds since 1970."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return as_numbers(column.cast(kind.value_type))
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        nanoseconds = pa.types.is_timestamp(kind) and kind.unit == "ns"
        try:
            # Truncated nanoseconds are not an error, but values beyond the range of microseconds are.
            microseconds = column.cast(pa.timestamp("us", tz=getattr(kind, "tz", None)), safe=not nanoseconds)
        except pa.ArrowInvalid:
            return as_numbers(column.view(pa.int32() if pa.types.is_date32(kind) else pa.int64())) * seconds_in(kind)
        return as_numbers(microseconds.view(pa.int64())) / 1e6
    if not pa.types.is_float64(kind):
        column = column.cast(pa.float64(), safe=False)
    return column.to_numpy(zero_copy_only=False)


def nan_as_null(column: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_nan(column), None, column) if pa.types.is_floating(column.type) else column


def seconds_in(kind: pa.DataType) -> float:
    if pa.types.is_date32(kind):
        return 86_400.0
    return 1e-3 if pa.types.is_date64(kind) or kind.unit == "ms" else 1.0


def with_dictionary(column: pa.Array) -> pa.DictionaryArray:
    return column if pa.types.is_dictionary(column.type) else column.dictionary_encode()


def dictionary_codes(column: pa.DictionaryArray) -> np.ndarray:
    """Return the dictionary index of every value; missing values get ``len(dictionary)``."""
    codes = column.indices if column.indices.null_count == 0 else pc.fill_null(column.indices, len(column.dictionary))
    return codes.to_numpy(zero_copy_only=False)


def class_label(value: object) -> str:
    """Return a value as a class name; 1 and 1.0 are one class."""
    if isinstance(value, Decimal):
        value = float(value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def class_labels(column: pa.Array) -> list[str]:
    return [class_label(value) for value in as_python(column)]


def as_python(column: pa.Array) -> list[object]:
    """Return Python values; for times outside Python's range or of an unknown zone, return Arrow's integers."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, pa.ArrowInvalid):
        return column.view(pa.int32() if pa.types.is_date32(column.type) else pa.int64()).to_pylist()
