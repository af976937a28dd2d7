"""Parameters of tests, few for ``make test`` and all others for ``make prove``."""

import itertools
from collections.abc import Iterable, Sequence
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


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value of each axis, so that every pair of values of two axes stands in one.

    The combination that adds most new pairs is taken next; the result is far shorter than the product.
    """
    left = list(itertools.product(*(range(len(axis)) for axis in axes)))
    seen, taken = set[Any](), list[tuple[Any, ...]]()

    def new(places: Sequence[int]) -> set[Any]:
        return set(itertools.combinations(enumerate(places), 2)) - seen

    while left:
        best = max(left, key=lambda places: len(new(places)))
        if not new(best):
            break
        seen |= new(best)
        taken.append(tuple(axis[place] for axis, place in zip(axes, best, strict=True)))
    return taken
