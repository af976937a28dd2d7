"""Sample rows for a model, drawn from its input statistics so that they hold no customer data."""

from __future__ import annotations

import numpy as np

from slipstream.pipeline.export.package.raw_columns import BOOLEAN, INTEGER, TEXT, TIME, NumericInput, RawColumns
from slipstream.shared.artifacts.prepared.data import Signature

ROWS = 16
#: Fraction of missing values in columns that had any in training.
GAPS = 0.15
#: Text outside every vocabulary.
UNSEEN_TEXT = "unseen"
SEED = 0
LARGEST = 2.0**53


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


def draw_raw(columns: RawColumns) -> dict[str, list[str] | list[float | None]]:
    """Draw ``ROWS`` JSON values per raw column; None is a missing number."""
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
    return drawn


def draw_numbers(number: NumericInput, kind: str, rng: np.random.Generator) -> list[float | None]:
    standard = rng.normal(size=ROWS)
    gaps = number.indicator & (rng.random(ROWS) < GAPS)
    values = invert_curve(number, number.mean + number.std * standard)
    if kind == BOOLEAN:
        values = (values > number.mean).astype(float)
    elif kind in (INTEGER, TIME):
        values = values.round()
    finite = values.clip(-LARGEST, LARGEST)
    return [None if gap else float(value) for value, gap in zip(finite, gaps, strict=True)]


def invert_curve(number: NumericInput, curved: np.ndarray) -> np.ndarray:
    """Return the raw numbers that a column's curve ("linear" or "log") maps to ``curved``."""
    if number.curve != "log":
        return curved
    with np.errstate(over="ignore"):
        return np.sign(curved) * number.scale * np.expm1(np.abs(curved))
