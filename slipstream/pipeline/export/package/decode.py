"""Decoding of prepared rows to raw columns, in order to encode them for another model."""

from __future__ import annotations

import numpy as np

from slipstream.pipeline.export.package.raw_columns import BOOLEAN, FIRST, INTEGER, MISSING, TIME, UNSEEN, RawColumns
from slipstream.pipeline.export.package.samples import invert_curve

#: Placeholder for a text outside the vocabulary, which the encoding cannot restore; no vocabulary contains it.
LOST = "\ufffdlost"
#: Units in seconds to which a decoded time is rounded if single-precision error explains the difference.
UNITS = (86_400.0, 3_600.0, 60.0, 1.0)


def decode_rows(columns: RawColumns, records: np.ndarray) -> dict[str, np.ndarray]:
    """Return every raw column as ``[rows]``: float64 with NaN for missing, or texts.

    Numbers have single precision, except integers and times at a full minute, hour or day. A text outside the
    vocabulary becomes ``LOST``.
    """
    decoded: dict[str, np.ndarray] = {}
    indicators = {name: len(columns.numbers) + index for index, name in enumerate(columns.indicators)}
    for index, number in enumerate(columns.numbers):
        if number.part:
            continue
        standard = records["numeric"][:, index].astype(np.float64)
        values = invert_curve(number, standard * number.std + number.mean)
        if columns.types[number.name] in (INTEGER, BOOLEAN):
            values = np.round(values)
        elif columns.types[number.name] == TIME:
            values = snap_times(values, number.std * np.abs(standard) * 2.0**-23)
        if number.name in indicators:
            values[records["numeric"][:, indicators[number.name]] == 1] = np.nan
        decoded[number.name] = values
    for index, category in enumerate(columns.categories):
        table = np.empty(FIRST + len(category.vocabulary), object)
        table[MISSING], table[UNSEEN], table[FIRST:] = columns.mark, LOST, category.vocabulary
        decoded[category.name] = table[records["categorical"][:, index]]
    return {name: decoded[name] for name in columns.types}


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


def undecided_rows(columns: RawColumns, other: RawColumns, records: np.ndarray) -> np.ndarray:
    """Return a mask (bool ``[rows]``) of rows with a text that ``columns`` lost and ``other`` may encode."""
    vocabularies = {category.name: set(category.vocabulary) for category in other.categories}
    lost = np.zeros(len(records), bool)
    for index, category in enumerate(columns.categories):
        if vocabularies.get(category.name, set()) - set(category.vocabulary):
            lost |= records["categorical"][:, index] == UNSEEN
    return lost
