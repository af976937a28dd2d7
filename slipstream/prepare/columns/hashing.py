"""Stable 64-bit hashes of rows: they decide splits and order, so they must never change.

Numbers hash by value (1 and 1.0 are the same), texts by their UTF-8 bytes (XXH3-64), and a row by the sum over its
columns of the mixed hash of name and value, so that the order of the columns does not matter. The mixer is
splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from slipstream.prepare.columns.value_types import codes_of

MISSING = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Mix uint64 values of any shape; a bijection."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def keys(first: int, rows: int, seed: int) -> np.ndarray:
    """Uniform uint64 ``[rows]`` of the row numbers ``first``, ``first + 1``, …: a pure function of number and seed."""
    start = np.uint64((seed * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64)
    return splitmix64(splitmix64(np.arange(first, first + rows, dtype=np.uint64)) ^ start)


def hash_rows(columns: Iterable[tuple[str, pa.Array]], rows: int) -> np.ndarray:
    """uint64 ``[rows]`` from named columns."""
    total = np.zeros(rows, np.uint64)
    for name, column in columns:
        salt = np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
        total += splitmix64(np.bitwise_xor(hash_values(column), salt))
    return splitmix64(total)


def hash_values(column: pa.Array) -> np.ndarray:
    """uint64 of each value of one column; all missing values, NaN among them, hash alike."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        if len(column.dictionary) <= len(column):
            return np.append(hash_values(column.dictionary), MISSING)[codes_of(column)]
        return hash_values(column.cast(kind.value_type))
    if pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.float64(), safe=False)
    elif pa.types.is_temporal(kind):
        # The unit of storage is not part of the value.
        width = pa.timestamp("us") if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else kind
        column = column.cast(width, safe=False).view(pa.int64()) if width.bit_width == 64 else column.view(pa.int32())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return hash_numbers(column)
    return hash_texts(column)


def hash_numbers(column: pa.Array) -> np.ndarray:
    present = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    values = (column if present is None else pc.fill_null(column, 0)).to_numpy(zero_copy_only=False)
    numbers = values.astype(np.float64) + 0.0  # -0.0 becomes 0.0
    bits = numbers.view(np.uint64)
    if values.dtype.kind in "iu":
        # Whole numbers above 2**53 share their nearest float; what is left over tells them apart.
        exact = np.abs(numbers) < 2**53
        if not exact.all():
            bits = np.where(exact, bits, splitmix64(values.astype(np.uint64)))
    else:
        gaps = np.isnan(numbers)
        if gaps.any():
            bits = np.where(gaps, MISSING, bits)
    return bits if present is None else np.where(present, bits, MISSING)


def hash_texts(column: pa.Array) -> np.ndarray:
    encoded = column.dictionary_encode()
    values = [MISSING if v is None else xxhash.xxh3_64_intdigest(as_bytes(v)) for v in encoded.dictionary.to_pylist()]
    return np.array([*values, MISSING], np.uint64)[codes_of(encoded)]


def as_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
