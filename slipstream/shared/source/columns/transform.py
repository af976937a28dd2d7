"""Transformation of raw columns to model inputs, used by training, scoring and serving.

It is fitted on the training rows and stored in ``schema.json`` and ``statistics.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import splitmix64
from slipstream.shared.source.columns.number_formats import NumberFormat
from slipstream.shared.source.columns.spelling import respell, rule_in_force, rule_of

#: Codes of missing and of unseen texts, and the first code of the vocabulary.
MISSING, UNSEEN, FIRST = 0, 1, 2
#: Number of hash buckets for words and word pairs, and the id that pads short documents.
BUCKETS = 1 << 16
PADDING = 0
BETWEEN_WORDS = r"[\s\p{P}\p{S}\p{C}]+"
#: Number of characters read of a document per token; more would rarely be used.
CHARACTERS_PER_TOKEN = 64
DAY = 86_400.0
LAST_SECOND = 9e18
#: Units in seconds to which a decoded time is rounded if single-precision error explains the difference.
UNITS = (DAY, 3_600.0, 60.0, 1.0)
#: Number of standard deviations at which outliers are clipped, to prevent overflow.
FARTHEST = 1e4
#: Number of rows encoded at once, few enough for the CPU cache.
CACHED_ROWS = 8192
#: Padding of matrix rows in values: columns a power of two apart would evict each other from the cache in the
#: transpose.
APART = 16


@dataclass(frozen=True)
class NumericColumn:
    """Numeric input: ``(f(x) - mean) / std``, or 0 where x is missing.

    ``curve`` is "linear" (f(x) = x) or "log" (f(x) = sign(x) log(1 + |x| / scale)), used for heavy tails. ``part``
    selects a component of a time: "" (seconds since 1970), "hour", "weekday" (Monday is 0) or "month". ``indicator``
    adds an input that is 1 where x is missing.
    """

    name: str
    mean: float
    std: float
    curve: str = "linear"
    scale: float = 1.0
    part: str = ""
    indicator: bool = False

    def curved(self, numbers: np.ndarray) -> np.ndarray:
        """Return f(x) (float64 ``[rows]``) of ``numbers``; NaN (missing) stays NaN."""
        return apply_curve(take_part(numbers, self.part), self.curve, self.scale)


@dataclass(frozen=True)
class CategoricalColumn:
    """Text column as int32 codes: 0 missing, 1 unseen or rare, then ``vocabulary`` in order.

    ``spelling`` is the rule of :mod:`.spelling` for the vocabulary and all texts.
    """

    name: str
    vocabulary: tuple[str, ...]
    spelling: str = ""

    @cached_property
    def rule(self) -> str:
        return rule_in_force(self.spelling, self.vocabulary)

    @property
    def cardinality(self) -> int:
        return len(self.vocabulary) + FIRST

    def encode(self, texts: pa.Array, missing: list[str]) -> np.ndarray:
        texts = value_types.with_dictionary(texts)
        # The batches of one row group share a dictionary. The pair is replaced at once, because threads may share this
        # column.
        dictionary, table = self._last[-1] if self._last else (None, None)
        if table is None or not texts.dictionary.equals(dictionary):
            table = self._table(texts.dictionary, missing)
            self._last[:] = [(texts.dictionary, table)]
        return table.take(value_types.dictionary_codes(texts))

    def _table(self, dictionary: pa.Array, missing: list[str]) -> np.ndarray:
        """Return the code of every text of a dictionary, and last the code of missing texts."""
        distinct = respell(value_types.clean_texts(dictionary.cast(pa.string()), missing), self.rule)
        indices = pc.index_in(distinct, value_set=pa.array(self.vocabulary, pa.string()))
        codes = pc.fill_null(pc.add(indices, FIRST), UNSEEN)
        codes = pc.if_else(distinct.is_valid(), codes, MISSING).to_numpy(zero_copy_only=False).astype(np.int32)
        return np.append(codes, np.int32(MISSING))

    @cached_property
    def _last(self) -> list[tuple[pa.Array, np.ndarray]]:
        """Last encoded dictionary and its table, at most one pair."""
        return []


@dataclass(frozen=True)
class Transform:
    """Fitted transformation of raw columns to inputs and target; ``types`` are the types of the raw columns."""

    target: str
    task: str
    types: dict[str, str]
    missing: list[str]
    decimal: str = "."
    thousands: str = ""
    numeric: tuple[NumericColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_std: float = 1.0
    target_dtype: str = "float32"
    #: Column of row weights ("" if unweighted), and its mean over the training rows, by which weights are divided.
    weight: str = ""
    weight_mean: float = 1.0
    #: Free-text columns, used by their words, and the number of token ids per column and row.
    documents: tuple[str, ...] = ()
    text_length: int = 0

    @property
    def indicators(self) -> list[str]:
        return [column.name for column in self.numeric if column.indicator]

    @property
    def columns(self) -> list[str]:
        """Names of the raw columns used as inputs, without repetition."""
        names = [column.name for column in self.numeric] + [column.name for column in self.categorical]
        return list(dict.fromkeys([*names, *self.documents]))

    @property
    def signature(self) -> Signature:
        width = len(self.numeric) + len(self.indicators)
        inputs = []
        if width:
            inputs.append(TensorSpec("numeric", "float32", (width,)))
        if self.categorical:
            inputs.append(TensorSpec("categorical", "int32", (len(self.categorical),)))
        if self.documents:
            inputs.append(TensorSpec("tokens", "int32", (len(self.documents), self.text_length)))
        return Signature(
            inputs=tuple(inputs),
            task=self.task,
            target=self.target,
            classes=self.classes,
            cardinalities=tuple(column.cardinality for column in self.categorical),
            target_mean=self.target_mean,
            target_std=self.target_std,
            target_dtype=self.target_dtype,
            weight=self.weight,
            buckets=BUCKETS if self.documents else 0,
        )

    def encode(
        self, batch: pa.RecordBatch, out: np.ndarray, numbers: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> None:
        """Write the inputs of raw rows to ``out``, a structured array ``[rows]`` with the signature's fields.

        ``numbers`` may hold columns already converted by :func:`.value_types.as_numbers`. Raise ``UserError`` if a
        column is missing or has values of another type.
        """
        there = set(batch.schema.names)
        absent = [name for name in self.columns if name not in there]
        if absent:
            raise UserError(f"data: the column {absent[0]!r} is missing, but the model was trained with it")
        names = {column.name for column in self.numeric}
        numbers = {name: numbers[name] if name in numbers else self._numbers(batch, name) for name in names}
        codes = np.empty((len(self.categorical), batch.num_rows), np.int32)
        for index, category in enumerate(self.categorical):
            codes[index] = category.encode(batch.column(category.name), self.missing)
        for index, name in enumerate(self.documents):
            out["tokens"][:, index] = tokenise_texts(batch.column(name), self.text_length)
        for start in range(0, batch.num_rows, CACHED_ROWS):
            rows = slice(start, start + CACHED_ROWS)
            if self.numeric:
                # An outlier may exceed float32 before it is clipped.
                with np.errstate(over="ignore"):
                    self._encode_numbers({name: column[rows] for name, column in numbers.items()}, out["numeric"][rows])
            if self.categorical:
                out["categorical"][rows] = codes[:, rows].T

    def _encode_numbers(self, numbers: dict[str, np.ndarray], out: np.ndarray) -> None:
        """Write all numeric inputs to ``out``, computed by column."""
        rows, width = out.shape
        matrix = np.empty((width, rows + APART), np.float32)[:, :rows]
        deviations = np.empty(rows)
        for index, column in enumerate(self.numeric):
            np.subtract(column.curved(numbers[column.name]), column.mean, out=deviations)
            np.divide(deviations, column.std, out=matrix[index], casting="same_kind")
        inputs = matrix[: len(self.numeric)]
        # The extremes are a cheap check of all values: they are NaN if any value is.
        usual = (inputs.min(axis=1, initial=0) >= -FARTHEST) & (inputs.max(axis=1, initial=0) <= FARTHEST)
        for unusual in np.flatnonzero(~usual):
            np.clip(inputs[unusual], -FARTHEST, FARTHEST, out=inputs[unusual])
            inputs[unusual][np.isnan(inputs[unusual])] = 0.0
        for index, name in enumerate(self.indicators, start=len(self.numeric)):
            matrix[index] = np.isnan(numbers[name])
        out[...] = matrix.T

    def encode_target(self, column: pa.Array) -> np.ndarray:
        """Return int32 class numbers, or values of ``target_dtype`` in the target's units."""
        if self.task == "regression":
            return value_types.as_numbers(column).astype(self.target_dtype)
        if self.types[self.target] == value_types.TEXT:
            categories = CategoricalColumn(self.target, self.classes, rule_of(self.classes))
            return (categories.encode(column, self.missing) - FIRST).astype(np.int32)
        distinct = column.dictionary_encode()
        numbers = {name: number for number, name in enumerate(self.classes)}
        table = np.array([numbers[name] for name in value_types.class_labels(distinct.dictionary)], np.int32)
        return table[distinct.indices.to_numpy()]

    def encode_weight(self, column: pa.Array) -> np.ndarray:
        """Return float32 ``[rows]`` weights with mean 1 over the training rows."""
        return (value_types.as_numbers(column) / self.weight_mean).astype(np.float32)

    def _numbers(self, batch: pa.RecordBatch, name: str) -> np.ndarray:
        column, number_format = batch.column(name), NumberFormat(self.decimal, self.thousands, tuple(self.missing))
        if value_types.column_type(column.type) != value_types.TEXT:
            return value_types.as_numbers(number_format.without_marks(column, self.types[name]))
        read, failed = number_format.convert(column.cast(pa.string()), self.types[name])
        if failed.any():
            row = int(np.flatnonzero(failed)[0])
            raise UserError(f"data: column {name!r}, row {row + 1}: {column[row].as_py()!r} is not {self.types[name]}")
        return value_types.as_numbers(read)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Transform:
        numeric = tuple(NumericColumn(**column) for column in data["numeric"])
        categorical = tuple(
            CategoricalColumn(**{**c, "vocabulary": tuple(c["vocabulary"])}) for c in data["categorical"]
        )
        names = {name: tuple(data[name]) for name in ("classes", "documents")}
        return cls(**{**data, "numeric": numeric, "categorical": categorical, **names})


def apply_curve(numbers: np.ndarray, curve: str, scale: float) -> np.ndarray:
    return np.sign(numbers) * np.log1p(np.abs(numbers) / scale) if curve == "log" else numbers


def invert_curve(curved: np.ndarray, curve: str, scale: float) -> np.ndarray:
    if curve != "log":
        return curved
    with np.errstate(over="ignore"):
        return np.sign(curved) * scale * np.expm1(np.abs(curved))


def decode_numbers(
    standard: np.ndarray, kind: str, mean: float, std: float, curve: str = "linear", scale: float = 1.0
) -> np.ndarray:
    """Return raw numbers, in single precision except integers and times at full ``UNITS``."""
    standard = standard.astype(np.float64)
    values = invert_curve(standard * std + mean, curve, scale)
    if kind in (value_types.INTEGER, value_types.BOOLEAN):
        return np.round(values)
    return snap_times(values, std * np.abs(standard) * 2.0**-23) if kind in value_types.TIMES else values


def snap_times(seconds: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Round each time to the largest of ``UNITS`` for which the change is within its ``error``."""
    left = np.ones(len(seconds), bool)
    rounded = seconds.copy()
    for unit in UNITS:
        nearest = np.round(seconds / unit) * unit
        fits = left & (np.abs(nearest - seconds) <= error)
        rounded[fits] = nearest[fits]
        left &= ~fits
    return rounded


def take_part(seconds: np.ndarray, part: str) -> np.ndarray:
    """Return the component ``part`` of times in seconds since 1970 (UTC) as float64, NaN where missing."""
    if part == "":
        return seconds
    if part == "hour":
        return seconds % DAY / 3600.0
    if part == "weekday":
        return (np.floor(seconds / DAY) + 3) % 7  # 1970-01-01 was a Thursday
    gaps = np.isnan(seconds)
    # Times beyond the range of 64 bits get an arbitrary month.
    months = (
        np.where(gaps, 0, seconds.clip(-LAST_SECOND, LAST_SECOND))
        .astype("datetime64[s]")
        .astype("datetime64[M]")
        .astype(np.int64)
        % 12
    )
    return np.where(gaps, np.nan, months)


# Words of documents are hashed, not looked up in a fitted vocabulary, so a text always has the same ids (Weinberger et
# al. 2009, Feature Hashing; pairs as in Joulin et al. 2016, Bag of Tricks for Efficient Text Classification).


def tokenise_texts(texts: pa.Array, length: int) -> np.ndarray:
    """Return int32 ``[rows, length]``: ids of the first words, each followed by the id of its pair with the next.

    Unused positions are ``PADDING``. Case and Unicode forms (NFKC) are ignored; a missing text is empty.
    """
    cut = pc.utf8_slice_codeunits(pc.fill_null(texts.cast(pa.string()), ""), 0, CHARACTERS_PER_TOKEN * length)
    plain = pc.utf8_lower(pc.utf8_normalize(cut, form="NFKC"))
    words = pc.split_pattern_regex(plain, BETWEEN_WORDS)
    flat = pc.list_flatten(words)
    rows = pc.list_parent_indices(words).to_numpy().astype(np.int64)
    there = pc.not_equal(pc.binary_length(flat), 0)
    hashes = hash_words(flat.filter(there))
    rows = rows[there.to_numpy(zero_copy_only=False)]
    begins = np.searchsorted(rows, np.arange(len(texts)))
    positions = 2 * (np.arange(len(rows)) - begins[rows])
    out = np.full((len(texts), length), PADDING, np.int32)
    put(out, rows, positions, hashes)
    # Rotating the first word distinguishes a pair from its reverse.
    pairs = splitmix64(np.bitwise_or(hashes[:-1] << np.uint64(1), hashes[:-1] >> np.uint64(63)) ^ hashes[1:])
    together = rows[1:] == rows[:-1]
    put(out, rows[:-1][together], positions[:-1][together] + 1, pairs[together])
    return out


def hash_words(words: pa.Array) -> np.ndarray:
    encoded = words.dictionary_encode()
    distinct = [xxhash.xxh3_64_intdigest(word.encode()) for word in encoded.dictionary.to_pylist()]
    return np.array(distinct, np.uint64)[encoded.indices.to_numpy()] if distinct else np.empty(0, np.uint64)


def put(out: np.ndarray, rows: np.ndarray, positions: np.ndarray, hashes: np.ndarray) -> None:
    fits = positions < out.shape[1]
    ids = 1 + (splitmix64(hashes[fits]) % np.uint64(BUCKETS - 1)).astype(np.int32)
    out[rows[fits], positions[fits]] = ids
