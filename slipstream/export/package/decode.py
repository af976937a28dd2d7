"""Decoding of prepared rows to typed raw columns, to run a model with another encoding on them."""

from __future__ import annotations

import numpy as np

from slipstream.export.package.raw_columns import BOOLEAN, FIRST, INTEGER, MISSING, TIME, UNSEEN, RawColumns
from slipstream.export.package.samples import unbend

#: Placeholder for a text that the encoding did not keep; no vocabulary holds it.
LOST = "\ufffdlost"
#: Time units in seconds to which times within single-precision error are rounded.
UNITS = (86_400.0, 3_600.0, 60.0, 1.0)


def decode(columns: RawColumns, records: np.ndarray) -> dict[str, np.ndarray]:
    """Return every raw column as ``[rows]``: float64 with NaN for missing, or texts.

    Numbers have single precision, except integers and times at a full minute, hour or day. A text that the vocabulary
    lacks becomes ``LOST``.
    """
    decoded: dict[str, np.ndarray] = {}
    indicators = {name: len(columns.numbers) + index for index, name in enumerate(columns.indicators)}
    for index, number in enumerate(columns.numbers):
        if number.part:
            continue
        standard = records["numeric"][:, index].astype(np.float64)
        values = unbend(number, standard * number.std + number.mean)
        if columns.types[number.name] in (INTEGER, BOOLEAN):
            values = np.round(values)
        elif columns.types[number.name] == TIME:
            values = snapped(values, number.std * np.abs(standard) * 2.0**-23)
        if number.name in indicators:
            values[records["numeric"][:, indicators[number.name]] == 1] = np.nan
        decoded[number.name] = values
    for index, category in enumerate(columns.categories):
        table = np.empty(FIRST + len(category.vocabulary), object)
        table[MISSING], table[UNSEEN], table[FIRST:] = columns.mark, LOST, category.vocabulary
        decoded[category.name] = table[records["categorical"][:, index]]
    return {name: decoded[name] for name in columns.types}


def snapped(seconds: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Round each time to the longest of ``UNITS`` within its ``error``."""
    left = np.ones(len(seconds), bool)
    rounded = seconds.copy()
    for unit in UNITS:
        nearest = np.round(seconds / unit) * unit
        fits = left & (np.abs(nearest - seconds) <= error)
        rounded[fits] = nearest[fits]
        left &= ~fits
    return rounded


def undecided(columns: RawColumns, other: RawColumns, records: np.ndarray) -> np.ndarray:
    """Return the rows (bool ``[rows]``) with a text that ``columns`` lost and ``other`` may know."""
    vocabularies = {category.name: set(category.vocabulary) for category in other.categories}
    lost = np.zeros(len(records), bool)
    for index, category in enumerate(columns.categories):
        if vocabularies.get(category.name, set()) - set(category.vocabulary):
            lost |= records["categorical"][:, index] == UNSEEN
    return lost
