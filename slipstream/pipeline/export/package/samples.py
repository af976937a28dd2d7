"""Sample rows drawn from a model's input statistics, and distributions of its training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream.pipeline.export.package.raw_columns import (
    FIRST,
    MISSING,
    UNSEEN,
    CategoryInput,
    NumericInput,
    RawColumns,
    raw_columns,
)
from slipstream.pipeline.export.package.raw_times import input_dtype
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.scoring import Bins, Distributions
from slipstream.shared.comparison.stability import fit_numbers, fit_predictions, fit_texts
from slipstream.shared.models.predict import ModelFunction, predict_records
from slipstream.shared.source.columns.spelling import respell
from slipstream.shared.source.columns.transform import decode_numbers, invert_curve
from slipstream.shared.source.columns.value_types import BOOLEAN, INTEGER, TEXT, TIME

ROWS = 16
#: Fraction of missing values in columns that had any in training.
GAPS = 0.15
#: Text outside every vocabulary.
UNSEEN_TEXT = "unseen"
SEED = 0
LARGEST = 2.0**53
#: First and last second of the years 0 to 9999, which ISO 8601 writes with four digits.
TIME_RANGE = -62_167_219_200.0, 253_402_300_799.0


def draw_tensors(signature: Signature) -> dict[str, np.ndarray]:
    """Draw inputs ``[ROWS, ...]``: standard normal numbers, random codes, pixels or token ids."""
    rng = np.random.default_rng(SEED)
    drawn: dict[str, np.ndarray] = {}
    for spec in signature.inputs:
        shape = (ROWS, *spec.shape)
        values: np.ndarray
        if spec.name == "categorical":
            values = rng.integers(0, signature.cardinalities, shape)
        elif signature.task == "next token":
            values = rng.integers(0, signature.buckets, shape)
        elif spec.name == "tokens":
            values = rng.integers(1, signature.buckets, shape)
            # A text shorter than the input is padded with 0.
            lengths = rng.integers(0, spec.shape[1] + 1, (*shape[:2], 1))
            values = np.where(np.arange(spec.shape[1]) < lengths, values, 0)
        elif spec.name == "image":
            mean, std = (np.reshape(each, (-1, 1, 1)) for each in (signature.image_mean, signature.image_std))
            values = rng.normal(mean, std, shape).round().clip(0, 255)
        else:
            values = rng.normal(size=shape)
        drawn[spec.name] = values.astype(spec.dtype)
    return drawn


def draw_raw(columns: RawColumns, opset: int) -> dict[str, list[str] | list[float | None]]:
    """Draw ``ROWS`` JSON values per raw column of a raw model in ``opset``; None is a missing number."""
    rng = np.random.default_rng(SEED)
    vocabularies = {category.name: category.vocabulary for category in columns.categories}
    numbers = {number.name: number for number in reversed(columns.numbers) if not number.part}
    drawn: dict[str, list[str] | list[float | None]] = {}
    for name, kind in columns.types.items():
        if kind == TEXT:
            choices = [*vocabularies[name], UNSEEN_TEXT]
            texts = [choices[index] for index in rng.integers(0, len(choices), ROWS)]
            if columns.missing:
                texts[int(rng.integers(ROWS))] = columns.mark
            drawn[name] = texts
        else:
            drawn[name] = draw_numbers(numbers[name], kind, rng)
            if input_dtype(kind, opset) == "string":
                drawn[name] = iso_texts(np.array(drawn[name], np.float64)).tolist()
    return drawn


def iso_texts(seconds: np.ndarray) -> np.ndarray:
    """Return times in seconds since 1970 (UTC) as texts in ISO 8601, at most the year 9999; "" for missing."""
    microseconds = np.round(np.nan_to_num(seconds).clip(*TIME_RANGE) * 1e6).astype("datetime64[us]")
    return np.where(np.isnan(seconds), "", np.datetime_as_string(microseconds)).astype(object)


def draw_numbers(number: NumericInput, kind: str, rng: np.random.Generator) -> list[float | None]:
    standard = rng.normal(size=ROWS)
    gaps = number.indicator & (rng.random(ROWS) < GAPS)
    values = invert_curve(number.mean + number.std * standard, number.curve, number.scale)
    if kind == BOOLEAN:
        values = (values > number.mean).astype(float)
    elif kind in (INTEGER, TIME):
        values = values.round()
    finite = values.clip(-LARGEST, LARGEST)
    return [None if gap else float(value) for value, gap in zip(finite, gaps, strict=True)]


#: Placeholder for a text outside the vocabulary, which the encoding cannot restore; no vocabulary contains it.
LOST = "\ufffdlost"


def decode_rows(columns: RawColumns, records: np.ndarray) -> dict[str, np.ndarray]:
    """Return every raw column as ``[rows]``: float64 with NaN for missing, or texts.

    A text outside the vocabulary becomes ``LOST``.
    """
    decoded: dict[str, np.ndarray] = {}
    indicators = {name: len(columns.numbers) + index for index, name in enumerate(columns.indicators)}
    for index, number in enumerate(columns.numbers):
        if number.part:
            continue
        kind, standard = columns.types[number.name], records["numeric"][:, index]
        values = decode_numbers(standard, kind, number.mean, number.std, number.curve, number.scale)
        if number.name in indicators:
            values[records["numeric"][:, indicators[number.name]] == 1] = np.nan
        decoded[number.name] = values
    for index, category in enumerate(columns.categories):
        table = np.empty(FIRST + len(category.vocabulary), object)
        table[MISSING], table[UNSEEN], table[FIRST:] = columns.mark, LOST, category.vocabulary
        decoded[category.name] = table[records["categorical"][:, index]]
    return {name: decoded[name] for name in columns.types}


def undecided_rows(columns: RawColumns, other: RawColumns, records: np.ndarray) -> np.ndarray:
    """Return a mask (bool ``[rows]``) of rows with a text that ``columns`` lost and ``other`` may encode."""
    vocabularies = {category.name: category.vocabulary for category in other.categories}
    lost = np.zeros(len(records), bool)
    for index, category in enumerate(columns.categories):
        if respelled(vocabularies.get(category.name, ()), category.rule).keys() - set(category.vocabulary):
            lost |= records["categorical"][:, index] == UNSEEN
    return lost


def respelled(vocabulary: Sequence[str], rule: str) -> dict[str, str]:
    """Return the texts of a vocabulary by their spelling under ``rule``."""
    return dict(zip(respell(pa.array(vocabulary, pa.string()), rule).to_pylist(), vocabulary, strict=True))


def as_spelled_by(other: RawColumns, columns: RawColumns, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return decoded ``values`` of ``columns`` with the texts as the vocabularies of ``other`` spell them."""
    rules = {category.name: category.rule for category in columns.categories}
    spelled = dict(values)
    for category in other.categories:
        names = respelled(category.vocabulary, rules.get(category.name, ""))
        texts = [names.get(text, text) for text in values[category.name]]
        spelled[category.name] = np.array(texts, object)
    return spelled


# The rows are a sample spread evenly over the training split. Numbers are decoded from prepared rows in single
# precision, so bin edges lie between two such numbers.
#: Maximum rows and bytes of the sample.
MOST_ROWS, MOST_BYTES = 1 << 16, 64 << 20


def model_distributions(model: ModelFunction, data: PreparedData) -> Distributions | None:
    """Return the distributions for a model exported with ``data``; None for next-token models, which are not scored."""
    signature = data.signature
    if signature.task == "next token":
        return None
    records = data.sample("train", max(1, min(MOST_ROWS, MOST_BYTES // signature.record.itemsize)))
    outputs = predict_records(model, signature, records)
    if signature.classes:
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        outputs = powers / powers.sum(axis=1, keepdims=True)
    predictions = fit_predictions(outputs.reshape(len(records), -1), signature.classes)
    columns = of_columns(data.artifact.read_json("statistics.json"), records)
    return Distributions(len(records), columns, predictions, training_ranges(data, columns))


def training_ranges(data: PreparedData, names: Collection[str]) -> dict[str, tuple[float, float]]:
    described = [column for column in data.card["columns"] if column["name"] in names] if names else []
    return {column["name"]: (column["min"], column["max"]) for column in described if {"min", "max"} <= column.keys()}


def of_columns(statistics: Mapping[str, Any], records: np.ndarray) -> dict[str, Bins]:
    """Return the bins of every numeric or categorical column; empty if the data are not a table."""
    if "types" not in statistics:
        return {}
    columns = raw_columns(statistics)
    decoded = decode_rows(columns, records)
    found = {name: fit_numbers(decoded[name]) for name in columns.numeric}
    for index, category in enumerate(columns.categories):
        found[category.name] = of_codes(category, records["categorical"][:, index])
    return {name: found[name] for name in columns.types}


def of_codes(category: CategoryInput, codes: np.ndarray) -> Bins:
    counts = np.bincount(codes, minlength=FIRST + len(category.vocabulary)).tolist()
    known = Counter(dict(zip(category.vocabulary, counts[FIRST:], strict=True)))
    return fit_texts(known, counts[MISSING], counts[UNSEEN])
