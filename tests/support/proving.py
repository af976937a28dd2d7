"""Parameters of which only the first belong to ``make test``; ``make prove`` has all others."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_few(values: Iterable[Any], kept: int = 1, names: Iterable[str] = ()) -> list[Any]:
    """Return parameters, those after the first ``kept`` marked for ``make prove``. A tuple holds several arguments."""
    known = dict(enumerate(names))
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=known.get(number),
            marks=[] if number < kept else [pytest.mark.prove],
        )
        for number, value in enumerate(values)
    ]


def diagonal(left: Iterable[Any], right: Iterable[Any]) -> list[Any]:
    """Return all pairs; those for ``make test`` have every value of both at least once."""
    rows, columns = list(left), list(right)
    shorter = min(len(rows), len(columns))
    return [
        pytest.param(row, column, marks=[] if across % shorter == down % shorter else [pytest.mark.prove])
        for down, row in enumerate(rows)
        for across, column in enumerate(columns)
    ]
