"""Splits that come with the data: the name of a split is the first folder of a file, or a value of a column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import Listing, SourceFile

LOG = logger("prepare")
#: Number of the split by lower-case name.
NUMBERS = {
    **dict.fromkeys(("train", "training"), 0),
    **dict.fromkeys(("val", "valid", "validation", "dev"), 1),
    "test": 2,
}
#: Largest number of names in a message.
SHOWN = 8
#: End of the sentence about a split that is drawn.
DRAWN = "of the training rows are drawn for it"
UNKNOWN = 255


def split_number(name: str | None) -> int:
    return NUMBERS.get((name or "").strip().lower(), UNKNOWN)


def folder_name(listing: Listing, file: SourceFile) -> str:
    """Return the first folder below the address; "" for a file in no folder."""
    first, slash, _ = listing.relative(file).partition("/")
    return first if slash else ""


def splits_of_files(listing: Listing, files: Sequence[SourceFile]) -> np.ndarray:
    """Return the number of every file's split, uint8."""
    return np.array([split_number(folder_name(listing, file)) for file in files], np.uint8)


def splits_of_column(column: pa.Array) -> np.ndarray:
    """Return the number of every row's split, uint8."""
    coded = value_types.with_dictionary(value_types.simplify_column(column).cast(pa.string()))
    numbers = np.array([*map(split_number, coded.dictionary.to_pylist()), UNKNOWN], np.uint8)
    return numbers[value_types.dictionary_codes(coded)]


def names_in(column: pa.Array) -> set[str | None]:
    """Return the distinct values of a column as texts."""
    return set(value_types.simplify_column(column).cast(pa.string()).unique().to_pylist())


def missing_splits(names: Iterable[str | None], config: DataConfig) -> list[int]:
    """Return the numbers of the splits that must be drawn, because no name is theirs.

    Raises ``UserError`` for other names, and without training rows.
    """
    setting = "directories" if config.split.directories else "column"
    found = sorted(name or "" for name in set(names))
    listed = ", ".join(map(repr, found[:SHOWN])) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    where = "folders" if config.split.directories else f"column {config.split.column!r}"
    numbers = {split_number(name) for name in found}
    if UNKNOWN in numbers:
        raise UserError(
            f"data.split.{setting}: the {where} {'hold' if config.split.directories else 'holds'} {listed}; expected "
            "only train, training, val, valid, validation, dev or test"
        )
    if 0 not in numbers:
        raise UserError(f"data.split.{setting}: there is no training split, only {listed}; expected train too")
    return [number for number in (1, 2) if number not in numbers]


def in_words(drawn: Sequence[int], config: DataConfig) -> list[str]:
    """Return a sentence for every split that is drawn from the training rows."""
    named = ((1, "validation", config.split.validation), (2, "test", config.split.test))
    return [
        f"data.split: no {name} split is given; {share:.3g} {DRAWN}" for number, name, share in named if number in drawn
    ]


def report_drawn(names: Iterable[str | None], config: DataConfig) -> list[int]:
    """Return :func:`missing_splits`, and log that they are drawn."""
    drawn = missing_splits(names, config)
    for sentence in in_words(drawn, config):
        LOG.warning("%s", sentence)
    return drawn


def refuse_column(config: DataConfig) -> None:
    """Raise ``UserError`` for a column of splits where rows have none."""
    if config.split.column:
        raise UserError(
            f"data.split.column: {config.split.column!r} is for tables; expected data.split.directories, or none"
        )
