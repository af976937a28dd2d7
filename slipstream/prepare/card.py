"""The data card: what was found in the data, as ``card.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.prepare.column_figures import (
    QUANTILES,
    ColumnFigures,
    column_figures,
    count_duplicates,
    duplicate_warnings,
    judgements,
)
from slipstream.prepare.columns import value_types
from slipstream.prepare.fit.fit import FittedColumns
from slipstream.prepare.fit.scan import SPLIT, ColumnCount, ScanResult
from slipstream.prepare.fit.splits import TRAIN
from slipstream.prepare.source.columnar import TableInput

TOP_VALUES = 20
#: The figures of columns that are of the sample where that is not the whole table; all others are of every row.
OF_SAMPLE = ["distinct numbers", "median", *QUANTILES, "histogram", "drift", "alone"]


@dataclass(frozen=True)
class ColumnCard:
    """A column on the card, without what is ``None``.

    ``top`` are the most frequent texts with their counts, ``rest`` counts the others; ``distinct_of`` is "sample" if
    distinct values were counted in the sample.
    """

    name: str
    role: str
    type: str
    missing: int | None = None
    why: str | None = None
    distinct: int | None = None
    distinct_of: str | None = None
    top: list[tuple[str, int]] | None = None
    rest: int | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    figures: ColumnFigures = ColumnFigures()

    def to_json(self) -> dict[str, object]:
        return present({**vars(self), **present(vars(self.figures)), "figures": None})


@dataclass(frozen=True)
class DataCard:
    """What ``card.json`` says, without what is ``None``.

    ``rows``: read, kept, quarantined, and of each split. ``classes``: the rows of each class by split. ``held_out``:
    how many held-out rows were looked at and how many are duplicates. ``earlier`` identifies the base set.
    """

    source: str
    rows: dict[str, int]
    task: str
    target: str
    columns: list[ColumnCard]
    classes: dict[str, dict[str, int]]
    warnings: list[str] = field(default_factory=list)
    sampled_rows: int | None = None
    of_sample: list[str] | None = None
    rank_error: float | None = None
    held_out: dict[str, int] | None = None
    earlier: dict[str, str] | None = None

    def to_json(self) -> dict[str, object]:
        return present({**vars(self), "columns": [column.to_json() for column in self.columns]})


def present(entries: dict[str, object]) -> dict[str, object]:
    return {name: entry for name, entry in entries.items() if entry is not None}


def row_counts(read: int, kept: list[int], quarantined: int) -> dict[str, int]:
    return {"read": read, "kept": sum(kept), "quarantined": quarantined, **dict(zip(SPLITS, kept, strict=True))}


def make_card(name: str, table: TableInput, scanned: ScanResult, fitted: FittedColumns, dropped: list[str]) -> DataCard:
    """Figures of columns are of the training rows, except ``missing`` (all rows kept)."""
    sample, transform = scanned.sample_table(), fitted.transform
    learned = int(np.count_nonzero(sample[SPLIT].to_numpy() == TRAIN))
    sampled = sample.num_rows < sum(scanned.rows)
    types = {column: kind for column, kind in table.types.items() if column not in dropped}
    figures = column_figures(sample, types, transform.target, transform.classes)
    columns = [
        describe(column, kind, fitted, scanned.column(column), figures.get(column), sampled)
        for column, kind in types.items()
    ]
    held_out = count_duplicates(sample, [*transform.columns, transform.target])
    judged = {column: figures[column] for column in transform.columns}
    return DataCard(
        source=name,
        rows=row_counts(table.read, scanned.rows, len(table.bad) + len(scanned.bad)),
        task=transform.task,
        target=transform.target,
        columns=columns + [ColumnCard(column, "dropped", table.types[column]) for column in dropped],
        classes={
            label: {split: scanned.classes[index].of.get(label, 0) for index, split in enumerate(SPLITS)}
            for label in transform.classes
        },
        warnings=[*table.warnings, *fitted.warnings, *judgements(judged), *duplicate_warnings(held_out)],
        sampled_rows=sample.num_rows,
        of_sample=OF_SAMPLE if sampled else [],
        rank_error=rank_error(learned) if sampled else 0.0,
        held_out=held_out,
    )


def describe(
    name: str, kind: str, fitted: FittedColumns, count: ColumnCount, figures: ColumnFigures | None, sampled: bool
) -> ColumnCard:
    role = fitted.roles[name]
    column = ColumnCard(name, role.role, kind, sum(count.missing), role.why or None)
    if figures is None:
        return column
    column = replace(column, figures=figures)
    if kind == value_types.TEXT:
        if count.prose:
            return column
        top = count.texts.ranked()[:TOP_VALUES]
        rest = sum(count.texts.of.values()) - sum(times for _, times in top)
        return replace(column, distinct=len(count.texts.of), top=top, rest=rest)
    if sampled:
        column = replace(column, distinct_of="sample")
    moments = count.moments[TRAIN]
    if not moments.count:
        return column
    mean, std, low, high = map(finite, (moments.mean, moments.std, moments.low, moments.high))
    return replace(column, mean=mean, std=std, min=low, max=high)


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def rank_error(rows: int) -> float:
    """How far the rank of a quantile of a sample of ``rows`` may be from its rank among all rows, as a share of them.

    The bound holds for all quantiles of a column at once with a probability of 95 % (Massart 1990, the tight constant
    of the Dvoretzky-Kiefer-Wolfowitz inequality).
    """
    return math.sqrt(math.log(2 / 0.05) / (2 * max(rows, 1)))
