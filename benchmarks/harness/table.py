"""Result tables of a benchmark, printed as text and written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Column(NamedTuple):
    """Column of every row's value at ``key``, empty if it has none; numbers are shown in units of ``unit``."""

    title: str
    key: str
    form: str = "{:.1f}"
    unit: float = 1

    def cell(self, figures: Mapping[str, float | str]) -> str:
        value = figures.get(self.key, "")
        return value if isinstance(value, str) else self.form.format(value / self.unit)


@dataclass(frozen=True)
class Table:
    """Named rows of numbers and words; printed are their ``columns``, then the ``remarks``.

    Numbers are finite and not negative: durations, rates, bytes, counts and ratios.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Mapping[str, Mapping[str, float | str]]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [["", *(column.title for column in self.columns)]]
        lines += [[name, *(column.cell(figures) for column in self.columns)] for name, figures in self.rows.items()]
        first, *others = (max(map(len, cells)) for cells in zip(*lines, strict=True))
        text = [
            f"{name:<{first}}" + "".join(f"{cell:>{width + 2}}" for cell, width in zip(cells, others, strict=True))
            for name, *cells in lines
        ]
        return "\n".join([self.title, *(line.rstrip() for line in text), *self.remarks])

    def to_json(self) -> dict[str, Any]:
        rows = [{"name": name, **figures} for name, figures in self.rows.items()]
        return {"title": self.title, "rows": rows, "remarks": list(self.remarks)}
