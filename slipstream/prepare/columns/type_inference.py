"""What columns of text hold, by their first rows, and what is said of those that are not quite what they seem."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from slipstream.prepare.columns import value_types
from slipstream.prepare.columns.number_formats import DECLARED, NumberFormat, readings
from slipstream.prepare.config import DataConfig
from slipstream.prepare.quarantine import BadRow


def guess_types(
    columns: Mapping[str, pa.Array], file: str, lines: np.ndarray, config: DataConfig
) -> tuple[dict[str, str], list[str]]:
    """The type of each column by the first rows, and a word on those that are numbers for the most part only.

    ``lines`` are where in ``file`` the rows lie.
    """
    types, warnings = {}, []
    number_format = NumberFormat.of(config)
    for name, texts in columns.items():
        if name in config.types:
            types[name] = DECLARED[config.types[name]]
            continue
        types[name] = number_format.guess(texts, tolerance(config))
        if types[name] != value_types.TEXT:
            continue
        failed = value_types.mostly_numbers(number_format.normalise(texts, value_types.NUMBER), config.missing)
        if separators := readings(texts, config.missing):
            warnings.append(
                f"column {name!r}: looks like numbers with separators, such as {texts.drop_null()[0].as_py()!r}, and "
                f"is taken as text; if they are numbers, set {' or '.join(separators)}, else declare it in data.types "
                "as text"
            )
        elif failed is not None and failed.any():
            row = int(np.flatnonzero(failed)[0])
            example = BadRow(file, int(lines[row]), name, "", texts[row].as_py())
            share = f"{np.count_nonzero(failed):,} of the first {len(failed):,} values"
            warnings.append(taken_as_text(example, share, value_types.NUMBER))
    return types, warnings


def tolerance(config: DataConfig) -> float:
    """The share of values that may be set aside before a column is taken for text."""
    return min(config.quarantine_limit, 0.1)


def taken_as_text(example: BadRow, share: str, kind: str) -> str:
    return (
        f"column {example.column!r}: {share} are not {kind} (the first is {example.raw[:60]!r} in {example.file}, line "
        f"{example.line}), so it is taken as text; if they mean missing, add them to data.missing"
    )
