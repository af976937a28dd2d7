"""The data card: what was found in the data, as ``card.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.prepare.column_figures import (
    QUANTILES,
    ColumnCard,
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
        return present({**vars(self), "columns": [present(vars(column)) for column in self.columns]})


def present(entries: dict[str, object]) -> dict[str, object]:
    return {name: entry for name, entry in entries.items() if entry is not None}


def row_counts(read: int, kept: list[int], quarantined: int) -> dict[str, int]:
    return {"read": read, "kept": sum(kept), "quarantined": quarantined, **dict(zip(SPLITS, kept, strict=True))}


def make_card(
    source: str, table: TableInput, scanned: ScanResult, fitted: FittedColumns, dropped: list[str]
) -> DataCard:
    """Figures of columns are of the training rows, except ``missing`` (all rows kept)."""
    sample, transform = scanned.sample_table(), fitted.transform
    learned = int(np.count_nonzero(sample[SPLIT].to_numpy() == TRAIN))
    sampled = sample.num_rows < sum(scanned.rows)
    types = {column: kind for column, kind in table.types.items() if column not in dropped}
    figures = column_figures(sample, types, transform.target, transform.classes)
    columns = [describe(column, fitted, scanned.column(column.name), sampled) for column in figures.values()]
    inputs = [figures[column] for column in transform.columns]
    held_out = count_duplicates(sample, [*transform.columns, transform.target])
    return DataCard(
        source=source,
        rows=row_counts(table.read, scanned.rows, len(table.bad) + len(scanned.bad)),
        task=transform.task,
        target=transform.target,
        columns=columns + [ColumnCard(name, table.types[name], "dropped") for name in dropped],
        classes={
            label: {split: scanned.classes[index].of.get(label, 0) for index, split in enumerate(SPLITS)}
            for label in transform.classes
        },
        warnings=[*table.warnings, *fitted.warnings, *judgements(inputs), *duplicate_warnings(held_out)],
        sampled_rows=sample.num_rows,
        of_sample=OF_SAMPLE if sampled else [],
        rank_error=rank_error(learned) if sampled else 0.0,
        held_out=held_out,
    )


def describe(column: ColumnCard, fitted: FittedColumns, count: ColumnCount, sampled: bool) -> ColumnCard:
    role = fitted.roles[column.name]
    column = replace(column, role=role.role, why=role.why or None, missing=sum(count.missing))
    if column.type == value_types.OTHER or (column.type == value_types.TEXT and count.prose):
        return column
    if column.type == value_types.TEXT:
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
