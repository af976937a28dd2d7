"""Identity of rows: a 64-bit hash of every value, independent of its storage type and spelling.

Rows with equal hashes are in the same split. Two spellings of one value must never have different hashes, but different
values may have equal ones. Rules:

* A number hashes by value, whether integer, float, decimal, boolean or text. In ids and groups, whole numbers of any
  size are exact. Other numbers, and all in a row's content, are rounded to float32, as model inputs are.
* A date or time hashes by its microsecond (UTC), in any unit and zone or as ISO 8601 text.
* Other text hashes by its UTF-8 bytes (XXH3-64) in normal form NFKC without surrounding spaces.
* All missing values have one hash, including NaN and the marks of ``data.missing``.

``ROW_HASH`` is the version of these rules and of the columns that decide a row's split, stored in prepared data and
exported models. Splits of different versions are not comparable.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from slipstream.shared.errors import UserError
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.number_formats import FALSE, TRUE, NumberFormat

ROW_HASH = 3
MISSING = np.uint64(0x9E3779B97F4A7C15)
#: Magnitude from which a float type cannot represent every whole number.
INEXACT = {pa.float32().id: 2.0**24, pa.float64().id: 2.0**53}
NOT_A_NUMBER = r"(?i)^[+-]?nan$"
TIME = r"^\d{4}"
#: Pattern that the marks for "missing" contain that may be numbers, booleans or times.
READABLE = r"(?i)\d|^[+-]?(nan|inf|infinity)$|^(true|false)$"
PLAIN = NumberFormat()


def comparable_rules(version: int, whole_rows: bool) -> int:
    """Return the newest version that hashes rows as ``version`` does.

    Version 3 differs from 2 only in rows without a value of ``data.id`` or ``data.group``; ``whole_rows`` says that
    neither is set.
    """
    return 3 if version == 2 and whole_rows else version


def hash_rows(columns: Iterable[tuple[str, pa.Array]], rows: int, number_format: NumberFormat = PLAIN) -> np.ndarray:
    """Return the uint64 ``[rows]`` hashes of rows, independent of the order of the columns."""
    return combine_hashes(((name, hash_values(column, number_format)) for name, column in columns), rows)


def combine_hashes(hashes: Iterable[tuple[str, np.ndarray]], rows: int) -> np.ndarray:
    """Return uint64 ``[rows]``: a hash of the sum of the columns' hashes, each mixed with its column's name."""
    total = np.zeros(rows, np.uint64)
    for name, column in hashes:
        salt = np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
        total += splitmix64(np.bitwise_xor(column, salt))
    return splitmix64(total)


def hash_values(column: pa.Array, number_format: NumberFormat = PLAIN, exact: bool = False) -> np.ndarray:
    """Return the uint64 ``[rows]`` hashes of a column; ``exact`` (for ids and groups) does not round whole numbers."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        if len(column.dictionary) > len(column):
            return hash_values(column.cast(kind.value_type), number_format, exact)
        distinct = hash_values(column.dictionary, number_format, exact)
        return np.append(distinct, MISSING)[value_types.dictionary_codes(column)]
    if value_types.column_type(kind) == value_types.TEXT or is_binary(kind):
        return hash_distinct(column, number_format, exact)
    hashes = hash_typed(column, exact)
    marks = readable_marks(number_format, exact)
    if len(marks):
        hashes = np.where(np.isin(hashes, marks), MISSING, hashes)
    if column.null_count:
        hashes = np.where(column.is_valid().to_numpy(zero_copy_only=False), hashes, MISSING)
    return hashes


def is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


@cache
def readable_marks(number_format: NumberFormat, exact: bool) -> np.ndarray:
    """Return the hashes of the marks for "missing" that numbers, booleans or times can equal, such as "-999"."""
    marks = pa.array(number_format.missing, pa.string())
    hashes = hash_texts(marks.filter(pc.match_substring_regex(marks, READABLE)), number_format, exact)
    return hashes[hashes != MISSING]


@cache
def all_marks(number_format: NumberFormat, exact: bool) -> np.ndarray:
    return hash_texts(pa.array(number_format.missing, pa.string()), number_format, exact)


# Columns with a type


def hash_typed(column: pa.Array, exact: bool) -> np.ndarray:
    """Hash numbers, booleans and times; the hash of a null is arbitrary."""
    kind = column.type
    if pa.types.is_decimal(kind) and exact:
        coded = column.dictionary_encode()
        distinct = coded.dictionary.to_pylist()
        return np.append(np.array(list(map(hash_decimal, distinct)), np.uint64), MISSING)[
            value_types.dictionary_codes(coded)
        ]
    if pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.float64(), safe=False)
    elif pa.types.is_temporal(kind):
        column, exact = in_microseconds(column), True
    values = (column if column.null_count == 0 else pc.fill_null(column, 0)).to_numpy(zero_copy_only=False)
    return hash_integers(values) if exact and values.dtype.kind in "iu" else hash_floats(values, exact)


def in_microseconds(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        unit = pa.timestamp("us", tz=getattr(kind, "tz", None))
    else:
        unit = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
    return column.cast(unit, safe=False).view(pa.int64())


def hash_integers(values: np.ndarray) -> np.ndarray:
    """Return exact hashes of integers; an integer that a float64 represents has the float's hash."""
    numbers = values.astype(np.float64)
    held = np.abs(numbers) < INEXACT[pa.float64().id]
    bits = numbers.view(np.uint64)
    return bits if held.all() else np.where(held, bits, splitmix64(values.astype(np.uint64)))


def hash_floats(values: np.ndarray, exact: bool) -> np.ndarray:
    """Return hashes of floats rounded to float32; ``exact`` does not round whole numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        double = values.astype(np.float64, copy=False)
        single = double.astype(np.float32).astype(np.float64)
        numbers = np.where(double == np.floor(double), double, single) if exact else single
    bits = (numbers + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    gaps = np.isnan(numbers)
    return np.where(gaps, MISSING, bits) if gaps.any() else bits


def hash_decimal(value: Decimal) -> int:
    if value != value.to_integral_value():
        return int(hash_floats(np.array([float(value)]), exact=False)[0])
    return hash_whole(int(value))


def hash_whole(value: int) -> int:
    if abs(value) < INEXACT[pa.float64().id]:
        return int(hash_integers(np.array([value]))[0])
    return int(splitmix64(np.array([value % 2**64], np.uint64))[0])


# Texts


def hash_distinct(column: pa.Array, number_format: NumberFormat, exact: bool) -> np.ndarray:
    """Return hashes of texts or bytes, computed once per distinct value; bytes in UTF-8 hash as text."""
    coded = column.dictionary_encode()
    distinct, bits = coded.dictionary, None
    if is_binary(column.type):
        bits = np.array([xxhash.xxh3_64_intdigest(value) for value in distinct.to_pylist()], np.uint64)
        distinct = pa.array(map(decoded, distinct.to_pylist()), pa.string(), size=len(distinct))
    hashes = hash_texts(distinct.cast(pa.string()), number_format, exact)
    hashes[np.isin(hashes, all_marks(number_format, exact))] = MISSING
    if bits is not None:
        hashes = np.where(distinct.is_valid(), hashes, bits)
    return np.append(hashes, MISSING)[value_types.dictionary_codes(coded)]


def decoded(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def hash_texts(texts: pa.Array, number_format: NumberFormat, exact: bool) -> np.ndarray:
    """Return hashes of texts by their meaning: a number, a yes or no, a time, or else the text itself."""
    texts = normal_form(texts)
    hashes = np.full(len(texts), MISSING, np.uint64)
    left = np.ones(len(texts), bool)

    def take(chosen: pa.Array) -> np.ndarray:
        """Return the positions of ``chosen`` texts that are not hashed yet, and mark them as hashed."""
        places = np.flatnonzero(left & pc.fill_null(chosen, False).to_numpy(zero_copy_only=False))
        left[places] = False
        return places

    take(pc.match_substring_regex(texts, NOT_A_NUMBER))
    places = take(pc.match_substring_regex(texts, number_format.pattern))
    if len(places):
        numbers = number_format.normalise(texts.take(pa.array(places)), value_types.NUMBER)
        hashes[places] = hash_spelled(numbers, exact)
    lower = pc.utf8_lower(texts)
    for word, number in (((*TRUE, "true"), 1.0), ((*FALSE, "false"), 0.0)):
        hashes[take(pc.is_in(lower, pa.array(word)))] = hash_floats(np.array([number]), exact=True)[0]
    places = take(pc.match_substring_regex(texts, TIME))
    if len(places):
        times, _ = value_types.convert_texts(texts.take(pa.array(places)), value_types.TIME, [])
        read = times.is_valid().to_numpy(zero_copy_only=False)
        hashes[places[read]] = hash_integers(in_microseconds(times.drop_null()).to_numpy())
        left[places[~read]] = True
    places = np.flatnonzero(left)
    others = texts.take(pa.array(places)).to_pylist()
    hashes[places] = [MISSING if text is None else xxhash.xxh3_64_intdigest(text.encode()) for text in others]
    return hashes


def normal_form(texts: pa.Array) -> pa.Array:
    plain = pc.string_is_ascii(texts)
    if pc.all(plain).as_py() is False:
        texts = pc.if_else(plain, texts, pc.utf8_normalize(texts, form="NFKC"))
    return pc.utf8_trim_whitespace(texts)


def hash_spelled(texts: pa.Array, exact: bool) -> np.ndarray:
    whole = value_types.cast_texts(texts, value_types.INTEGER)
    if whole is not None and pa.types.is_integer(whole.type):
        return hash_values(whole, PLAIN, exact)
    numbers = value_types.as_far_as_read(texts).to_numpy(zero_copy_only=False)
    hashes = hash_floats(numbers, exact)
    if exact:
        # Digits decide beyond the precision of a float. Infinity does not occur as an id.
        for place in np.flatnonzero((np.abs(numbers) >= INEXACT[pa.float64().id]) & np.isfinite(numbers)).tolist():
            hashes[place] = hash_decimal(Decimal(texts[place].as_py()))
    return hashes


# Ids and groups


def hash_identities(
    column: pa.Array, number_format: NumberFormat, name: str, file: str, lines: np.ndarray
) -> np.ndarray:
    """Return the uint64 ``[rows]`` hashes of the id or group column, which alone decides the split.

    ``lines`` are the rows' lines in ``file``. Raise ``UserError`` for a number that may have been rounded.
    """
    if pa.types.is_dictionary(column.type) and len(column.dictionary) > len(column):
        column = column.cast(column.type.value_type)
    inexact = np.flatnonzero(inexact_values(column, number_format))
    if len(inexact):
        row = int(inexact[0])
        raise UserError(
            f"{file}, line {int(lines[row])}: the column {name!r} decides splits, but holds "
            f"{value_types.as_python(column.slice(row, 1))[0]!r} as a float, which cannot be distinguished from other "
            "ids of that size; expected whole numbers, or texts of all their digits"
        )
    return hash_values(column, number_format, exact=True)


def inexact_values(column: pa.Array, number_format: NumberFormat) -> np.ndarray:
    """Return which numbers (bool ``[rows]``) are so large that, as floats, they may equal their neighbours.

    In text only numbers with an exponent or a fraction count.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        flawed = np.append(inexact_values(column.dictionary, number_format), False)
        return flawed[value_types.dictionary_codes(column)]
    if kind.id in INEXACT:
        return np.abs(value_types.as_numbers(column)) >= INEXACT[kind.id]
    if value_types.column_type(kind) != value_types.TEXT:
        return np.zeros(len(column), bool)
    texts = normal_form(column.cast(pa.string()))
    as_float = pc.match_substring_regex(texts, f"[{number_format.decimal}eE]")
    chosen = pc.and_(pc.match_substring_regex(texts, number_format.pattern), as_float)
    places = np.flatnonzero(pc.fill_null(chosen, False).to_numpy(zero_copy_only=False))
    flawed = np.zeros(len(column), bool)
    if len(places):
        numbers = number_format.normalise(texts.take(pa.array(places)), value_types.NUMBER)
        large = np.abs(value_types.as_far_as_read(numbers).to_numpy(zero_copy_only=False)) >= INEXACT[pa.float64().id]
        flawed[places] = large
    return flawed


# The mixer is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
def splitmix64(x: np.ndarray) -> np.ndarray:
    """Mix uint64 values of any shape; a bijection."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def row_keys(first: int, rows: int, seed: int) -> np.ndarray:
    """Return uniform uint64 ``[rows]`` for the row numbers from ``first`` on, determined by number and seed alone."""
    start = np.uint64((seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64)
    return splitmix64(splitmix64(np.arange(first, first + rows, dtype=np.uint64)) ^ start)
