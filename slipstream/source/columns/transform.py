"""The one function from raw columns to a model's inputs: what training used, scoring and serving use too.

It is fitted on the training rows and travels as ``schema.json`` and ``statistics.json``.
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

from slipstream.artifacts.prepared.data import Signature, TensorSpec
from slipstream.errors import UserError
from slipstream.source.columns import value_types
from slipstream.source.columns.hashing import splitmix64
from slipstream.source.columns.number_formats import NumberFormat

#: Codes of texts, and of the first in the vocabulary.
MISSING, UNSEEN, FIRST = 0, 1, 2
#: Ids of words and of pairs of words, and what fills up a short document.
BUCKETS = 1 << 16
PADDING = 0
BETWEEN_WORDS = r"[\s\p{P}\p{S}\p{C}]+"
#: Of a long text as many characters per token are looked at; what is beyond would hardly be used.
CHARACTERS_PER_TOKEN = 64
DAY = 86_400.0
LAST_SECOND = 9e18
#: Standard deviations at which an outlier is cut off, so that it cannot overflow.
FARTHEST = 1e4
#: Rows that are encoded at once, so that they stay in the processor's cache.
CACHED_ROWS = 8192
#: Added to the rows of a matrix: columns a power of two apart would evict each other from the cache when it is turned.
APART = 16


@dataclass(frozen=True)
class NumericColumn:
    """A number made an input: ``(f(x) - mean) / std``, and the mean where x is missing.

    ``curve`` is "linear" (f(x) = x) or "log" (f(x) = sign(x) log(1 + |x| / scale)), which is taken for heavy tails.
    ``part`` is what is taken of a time: "" (seconds since 1970), "hour", "weekday" (Monday is 0) or "month".
    ``indicator`` adds an input that is 1 where x is missing.
    """

    name: str
    mean: float
    std: float
    curve: str = "linear"
    scale: float = 1.0
    part: str = ""
    indicator: bool = False

    def curved(self, numbers: np.ndarray) -> np.ndarray:
        """f(x): float64 ``[rows]`` from float64 ``[rows]``; NaN, for missing, stays."""
        return bend(take_part(numbers, self.part), self.curve, self.scale)


@dataclass(frozen=True)
class CategoricalColumn:
    """A text made an int32 code: 0 missing, 1 unseen or rare, then ``vocabulary`` in order."""

    name: str
    vocabulary: tuple[str, ...]

    @property
    def cardinality(self) -> int:
        return len(self.vocabulary) + FIRST

    def encode(self, texts: pa.Array, missing: list[str]) -> np.ndarray:
        texts = value_types.with_dictionary(texts)
        # The batches of one row group share a dictionary. A pair, because threads may share this column.
        dictionary, table = self._last[-1] if self._last else (None, None)
        if table is None or not texts.dictionary.equals(dictionary):
            table = self._table(texts.dictionary, missing)
            self._last[:] = [(texts.dictionary, table)]
        return table.take(value_types.codes_of(texts))

    def _table(self, dictionary: pa.Array, missing: list[str]) -> np.ndarray:
        """The code of each text of a dictionary, and at the end that of missing ones."""
        distinct = value_types.clean(dictionary.cast(pa.string()), missing)
        indices = pc.index_in(distinct, value_set=pa.array(self.vocabulary, pa.string()))
        codes = pc.fill_null(pc.add(indices, FIRST), UNSEEN)
        codes = pc.if_else(distinct.is_valid(), codes, MISSING).to_numpy(zero_copy_only=False).astype(np.int32)
        return np.append(codes, np.int32(MISSING))

    @cached_property
    def _last(self) -> list[tuple[pa.Array, np.ndarray]]:
        """The dictionary that was encoded last, and its table."""
        return []


@dataclass(frozen=True)
class Transform:
    """Raw columns to inputs and target. ``types`` are the types of the raw columns that it reads."""

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
    #: The column of weights, if there is one, and the mean over the training rows by which they are divided.
    weight: str = ""
    weight_mean: float = 1.0
    #: The columns of texts that are learned from by their words, and how many ids are kept of each.
    documents: tuple[str, ...] = ()
    text_length: int = 0

    @property
    def indicators(self) -> list[str]:
        return [column.name for column in self.numeric if column.indicator]

    @property
    def columns(self) -> list[str]:
        """The raw columns that are inputs, each once."""
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
            weight=self.weight,
            buckets=BUCKETS if self.documents else 0,
        )

    def encode(
        self, batch: pa.RecordBatch, out: np.ndarray, numbers: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> None:
        """Write the inputs of raw rows into ``out``, a structured array ``[rows]`` with the signature's fields.

        ``numbers`` are columns that were read before, as :func:`.value_types.as_numbers` reads them.
        Raises ``UserError`` when a column is missing or holds values of another type.
        """
        there = set(batch.schema.names)
        absent = [name for name in self.columns if name not in there]
        if absent:
            raise UserError(f"data: the column {absent[0]!r} is not there, but the model was trained with it")
        names = {column.name for column in self.numeric}
        numbers = {name: numbers[name] if name in numbers else self._numbers(batch, name) for name in names}
        codes = np.empty((len(self.categorical), batch.num_rows), np.int32)
        for index, category in enumerate(self.categorical):
            codes[index] = category.encode(batch.column(category.name), self.missing)
        for index, name in enumerate(self.documents):
            out["tokens"][:, index] = tokenise(batch.column(name), self.text_length)
        for start in range(0, batch.num_rows, CACHED_ROWS):
            rows = slice(start, start + CACHED_ROWS)
            if self.numeric:
                # An outlier may be too large for float32 before it is cut off.
                with np.errstate(over="ignore"):
                    self._encode_numbers({name: column[rows] for name, column in numbers.items()}, out["numeric"][rows])
            if self.categorical:
                out["categorical"][rows] = codes[:, rows].T

    def _encode_numbers(self, numbers: dict[str, np.ndarray], out: np.ndarray) -> None:
        """All numeric inputs at once: column after column as the rows of a matrix, which is turned at the end."""
        rows, width = out.shape
        matrix = np.empty((width, rows + APART), np.float32)[:, :rows]
        deviations = np.empty(rows)
        for index, column in enumerate(self.numeric):
            np.subtract(column.curved(numbers[column.name]), column.mean, out=deviations)
            np.divide(deviations, column.std, out=matrix[index], casting="same_kind")
        inputs = matrix[: len(self.numeric)]
        # The extremes tell at once whether all is well: they are NaN if any value is.
        usual = (inputs.min(axis=1, initial=0) >= -FARTHEST) & (inputs.max(axis=1, initial=0) <= FARTHEST)
        for unusual in np.flatnonzero(~usual):
            np.clip(inputs[unusual], -FARTHEST, FARTHEST, out=inputs[unusual])
            inputs[unusual][np.isnan(inputs[unusual])] = 0.0
        for index, name in enumerate(self.indicators, start=len(self.numeric)):
            matrix[index] = np.isnan(numbers[name])
        out[...] = matrix.T

    def encode_target(self, column: pa.Array) -> np.ndarray:
        """int32 class numbers, or float32 in the target's own units."""
        if self.task == "regression":
            return value_types.as_numbers(column).astype(np.float32)
        if self.types[self.target] == value_types.TEXT:
            return (CategoricalColumn(self.target, self.classes).encode(column, self.missing) - FIRST).astype(np.int32)
        distinct = column.dictionary_encode()
        numbers = {name: number for number, name in enumerate(self.classes)}
        table = np.array([numbers[name] for name in value_types.labels(distinct.dictionary)], np.int32)
        return table[distinct.indices.to_numpy()]

    def encode_weight(self, column: pa.Array) -> np.ndarray:
        """float32 ``[rows]``, with a mean of 1 over the training rows: the loss keeps its scale."""
        return (value_types.as_numbers(column) / self.weight_mean).astype(np.float32)

    def _numbers(self, batch: pa.RecordBatch, name: str) -> np.ndarray:
        column, number_format = batch.column(name), NumberFormat(self.decimal, self.thousands, tuple(self.missing))
        if value_types.type_of(column.type) != value_types.TEXT:
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
        categorical = tuple(CategoricalColumn(c["name"], tuple(c["vocabulary"])) for c in data["categorical"])
        names = {name: tuple(data[name]) for name in ("classes", "documents")}
        return cls(**{**data, "numeric": numeric, "categorical": categorical, **names})


def bend(numbers: np.ndarray, curve: str, scale: float) -> np.ndarray:
    return np.sign(numbers) * np.log1p(np.abs(numbers) / scale) if curve == "log" else numbers


def take_part(seconds: np.ndarray, part: str) -> np.ndarray:
    """A part of times in seconds since 1970 (UTC), as float64 with NaN where missing."""
    if part == "":
        return seconds
    if part == "hour":
        return seconds % DAY / 3600.0
    if part == "weekday":
        return (np.floor(seconds / DAY) + 3) % 7  # 1970-01-01 was a Thursday
    gaps = np.isnan(seconds)
    # Times beyond what 64 bits count have some month.
    months = (
        np.where(gaps, 0, seconds.clip(-LAST_SECOND, LAST_SECOND))
        .astype("datetime64[s]")
        .astype("datetime64[M]")
        .astype(np.int64)
        % 12
    )
    return np.where(gaps, np.nan, months)


# Words of documents. There is no vocabulary to fit or to carry along, so a text has the same ids whatever else is in
# the data (Weinberger et al. 2009, Feature Hashing; pairs as in Joulin et al. 2016, Bag of Tricks for Efficient Text
# Classification).


def tokenise(texts: pa.Array, length: int) -> np.ndarray:
    """int32 ``[rows, length]`` of texts: the ids of the first words, each followed by that of its pair with the next
    word; then ``PADDING``. Upper and lower case and the forms of Unicode (NFKC) are the same; a missing text is empty.
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
    # A pair is told from its reverse by the rotation of its first word.
    pairs = splitmix64(np.bitwise_or(hashes[:-1] << np.uint64(1), hashes[:-1] >> np.uint64(63)) ^ hashes[1:])
    together = rows[1:] == rows[:-1]
    put(out, rows[:-1][together], positions[:-1][together] + 1, pairs[together])
    return out


def hash_words(words: pa.Array) -> np.ndarray:
    """uint64 of each word."""
    encoded = words.dictionary_encode()
    distinct = [xxhash.xxh3_64_intdigest(word.encode()) for word in encoded.dictionary.to_pylist()]
    return np.array(distinct, np.uint64)[encoded.indices.to_numpy()] if distinct else np.empty(0, np.uint64)


def put(out: np.ndarray, rows: np.ndarray, positions: np.ndarray, hashes: np.ndarray) -> None:
    fits = positions < out.shape[1]
    ids = 1 + (splitmix64(hashes[fits]) % np.uint64(BUCKETS - 1)).astype(np.int32)
    out[rows[fits], positions[fits]] = ids
