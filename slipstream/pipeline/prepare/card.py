"""Data card (``card.json``): statistics of the data, and warnings of leaks, drift and duplicates.

Leaks, drift, duplicates and quantiles come from a sample, and are exact up to ``memory.SAMPLE_ROWS`` rows. For larger
tables the card states the rank error of quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.pipeline.prepare.drift import drift_by_split
from slipstream.pipeline.prepare.fit.fit import FittedColumns
from slipstream.pipeline.prepare.fit.scan import TEXT_IN_SAMPLE
from slipstream.pipeline.prepare.fit.scan_result import SPLIT, ColumnCount, ScanResult
from slipstream.pipeline.prepare.fit.splits import TRAIN
from slipstream.shared.artifacts.prepared.card import ColumnCard, DataCard
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.comparison.stability import DriftTest, significant_drifts
from slipstream.shared.source.columnar import TableInput
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import hash_rows
from slipstream.shared.source.files import Listing

BINS = 20
QUANTILES = {"p1": 0.01, "p25": 0.25, "p75": 0.75, "p99": 0.99}
#: Univariate score from which a column is reported as a leak.
LEAK = 0.98
#: Smallest number of held-out rows for detecting leaks.
ENOUGH = 50
#: Smallest number of held-out rows of a class, and of all others, for an area under its curve.
ENOUGH_OF_CLASS = 5
#: Share of held-out rows from which duplicates are reported: in tables of few values some rows are equal by chance.
MANY_DUPLICATES = 0.01
TOP_VALUES = 20
#: Entries computed from the sample if it is not the whole table; all other entries cover every row.
OF_SAMPLE = ["distinct numbers", "median", *QUANTILES, "histogram", "drift", "drift_chance", "alone"]


def row_counts(read: int, kept: list[int], quarantined: int) -> dict[str, int]:
    return {"read": read, "kept": sum(kept), "quarantined": quarantined, **dict(zip(SPLITS, kept, strict=True))}


def make_card(
    source: str, table: TableInput, scanned: ScanResult, fitted: FittedColumns, dropped: list[str]
) -> DataCard:
    """Return the data card; column statistics cover the training rows, except ``missing`` (all rows kept)."""
    sample, transform = scanned.sample_table(), fitted.transform
    learned = int(np.count_nonzero(sample[SPLIT].to_numpy() == TRAIN))
    sampled = sample.num_rows < sum(scanned.rows)
    types = {column: kind for column, kind in table.types.items() if column not in dropped}
    figures = column_figures(sample, types, transform.target, transform.classes)
    columns = [describe_column(column, fitted, scanned.column(column.name), sampled) for column in figures.values()]
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
        warnings=[
            *table.warnings,
            *fitted.warnings,
            *column_warnings(inputs),
            *order_warnings([column for column in inputs if column.name in scanned.ordered]),
            *duplicate_warnings(held_out),
        ],
        sampled_rows=sample.num_rows,
        of_sample=OF_SAMPLE if sampled else [],
        rank_error=rank_error(learned) if sampled else 0.0,
        held_out=held_out,
    )


def with_skipped(card: DataCard, listing: Listing) -> DataCard:
    return replace(card, skipped=len(listing.skipped) or None, warnings=[*listing.warnings, *card.warnings])


def describe_column(column: ColumnCard, fitted: FittedColumns, count: ColumnCount, sampled: bool) -> ColumnCard:
    role = fitted.roles[column.name]
    column = replace(column, role=role.role, why=role.why or None, missing=sum(count.missing))
    if column.type == value_types.OTHER or (column.type == value_types.TEXT and count.prose):
        return column
    if column.type == value_types.TEXT:
        # Cut as in the sample, with which those of a later card are compared.
        top = [(text[:TEXT_IN_SAMPLE], times) for text, times in count.texts.ranked()[:TOP_VALUES]]
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
    """Return the largest error of a quantile's rank in a sample of ``rows``, as a share of all rows.

    The bound holds for all quantiles of a column at once with a probability of 95 % (Massart 1990).
    """
    return math.sqrt(math.log(2 / 0.05) / (2 * max(rows, 1)))


# Figures from the sample


def with_distribution(column: ColumnCard, ascending: np.ndarray, distinct: int) -> ColumnCard:
    """Return the column with quantiles and a histogram of its sorted numbers; ``distinct`` counts different ones."""
    if len(ascending) == 0:
        return replace(column, distinct=0)
    low, high, *cuts = quantiles(ascending, np.array([0.005, 0.995, *QUANTILES.values()])).tolist()
    inside = ascending[np.searchsorted(ascending, low) : np.searchsorted(ascending, high, side="right")]
    try:
        counts, edges = np.histogram(inside, BINS if high > low else 1)
    except ValueError:
        # Fewer floating point numbers lie between the two than bins.
        counts, edges = np.histogram(inside, [low, np.nextafter(high, np.inf)])
    return replace(
        column,
        distinct=distinct,
        median=float(ascending[(len(ascending) - 1) // 2] + ascending[len(ascending) // 2]) / 2,
        histogram={"edges": edges.tolist(), "counts": counts.tolist()},
        **dict(zip(QUANTILES, cuts, strict=True)),
    )


def quantiles(ascending: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the same quantiles as ``numpy.quantile`` (linear interpolation) of numbers that are already sorted."""
    return np.interp(shares * (len(ascending) - 1), np.arange(len(ascending)), ascending)


def bin_values(column: np.ndarray, ascending: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the bin of every value (int64 ``[rows]``, 0 for missing).

    Bins have equal counts of the sorted training values ``ascending``, or are single values if few are distinct.
    ``new`` holds the indices at which another value starts.
    """
    if len(ascending) == 0:
        return np.zeros(len(column), np.int64)
    # Few values are their own bins.
    edges = ascending[new] if len(new) < 3 * BINS else quantiles(ascending, np.linspace(0, 1, BINS + 1)[1:-1])
    return np.where(np.isnan(column), 0, 1 + np.searchsorted(edges, column, side="right"))


def text_bins(column: pa.ChunkedArray) -> np.ndarray:
    """Return a number per distinct text (int64 ``[rows]``), 0 for missing."""
    encoded = column.combine_chunks().dictionary_encode()
    return pc.fill_null(pc.add(encoded.indices, 1), 0).to_numpy(zero_copy_only=False).astype(np.int64)


class LabelledRows(NamedTuple):
    """Row indices in the sample (training or held-out), and their target: class numbers (int64) or float64."""

    rows: np.ndarray
    target: np.ndarray


def predicts_alone(
    binned: np.ndarray, numbers: np.ndarray | None, train: LabelledRows, held_out: LabelledRows, classes: int
) -> float | None:
    """Return the univariate score of a binned column on held-out rows, at least 0; ``None`` if they are too few.

    Every bin predicts the mean or the class shares of its training rows. The score is R², or 2 AUC - 1 averaged over
    the classes (one against the rest).
    """
    if len(held_out.rows) < ENOUGH:
        return None
    size = int(binned.max(initial=0)) + 1
    learned, held = binned.take(train.rows), binned.take(held_out.rows)
    if classes:
        table = class_table(learned, train.target, size, classes)
        prior = table.sum(axis=0) / max(1, len(train.rows))
        # An unknown bin predicts the classes as frequent as they are, and a small one nearly so.
        shares = (table + prior) / (table.sum(axis=1, keepdims=True) + 1)
        counts = class_table(held, held_out.target, size, classes)
        rest = counts.sum(axis=1, keepdims=True) - counts
        enough = np.minimum(counts.sum(axis=0), rest.sum(axis=0)) >= ENOUGH_OF_CLASS
        if not enough.any():
            return None
        # Numbers are ranked themselves if that separates the training rows better than their bins.
        if numbers is not None and classes == 2:
            separated = 2 * area_under_curve(numbers.take(train.rows), train.target, 1 - train.target) - 1
            if abs(separated) >= 2 * area_without_own_row(table, prior[1]) - 1:
                ranked = numbers.take(held_out.rows)
                area = area_under_curve(ranked, held_out.target, 1 - held_out.target)
                return max(0.0, float(np.sign(separated) * (2 * area - 1)))
        areas = [
            area_under_curve(*each) for each in zip(shares.T[enough], counts.T[enough], rest.T[enough], strict=True)
        ]
        return max(0.0, float(2 * np.mean(areas) - 1))
    overall = train.target.mean()
    count = np.bincount(learned, minlength=size)
    total = np.bincount(learned, train.target, minlength=size)
    mean = np.where(count > 0, total / np.maximum(count, 1), overall)
    wrong = np.mean((mean.take(held) - held_out.target) ** 2)
    base = np.mean((overall - held_out.target) ** 2)
    return max(0.0, float(1 - wrong / base)) if base > 0 else None


def class_table(binned: np.ndarray, target: np.ndarray, size: int, classes: int) -> np.ndarray:
    return np.bincount(binned * classes + target, minlength=size * classes).reshape(size, classes)


def area_under_curve(scores: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> float:
    """Return the area under the ROC curve of ``scores`` with numbers of rows; 0.5 if all are of one class."""
    _, level = np.unique(scores, return_inverse=True)
    ahead, behind = np.bincount(level, positive), np.bincount(level, negative)
    pairs = ahead.sum() * behind.sum()
    return float((ahead * (np.cumsum(behind) - behind / 2)).sum() / pairs) if pairs else 0.5


def area_without_own_row(table: np.ndarray, prior: float) -> float:
    # Every training row is scored by the other rows of its bin.
    negative, positive = table.T
    rows, nothing = np.maximum(1, negative + positive), np.zeros(len(table))
    scores = np.append((positive - 1 + prior) / rows, (positive + prior) / rows)
    return area_under_curve(scores, np.append(positive, nothing), np.append(nothing, negative))


def column_figures(
    sample: pa.Table, types: dict[str, str], target: str, classes: tuple[str, ...]
) -> dict[str, ColumnCard]:
    """Return the statistics of every column from the sample; columns of unsupported values have only a type."""
    splits = sample[SPLIT].to_numpy()
    truth = target_numbers(sample[target], types[target], classes)
    halves = [np.flatnonzero(splits == TRAIN), np.flatnonzero(splits != TRAIN)]
    train, held_out = (LabelledRows(rows, truth.take(rows)) for rows in halves)
    columns = {name: ColumnCard(name, kind) for name, kind in types.items()}
    for name, kind in types.items():
        if kind == value_types.OTHER:
            continue
        if kind == value_types.TEXT:
            binned, numbers = text_bins(sample[name]), None
        else:
            numbers = sample[name].to_numpy()
            learned = numbers.take(train.rows)
            ascending = np.sort(learned[~np.isnan(learned)])
            new = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
            binned = bin_values(numbers, ascending, new)
            columns[name] = with_distribution(columns[name], ascending, len(new) + 1)
        alone = None if name == target else predicts_alone(binned, numbers, train, held_out, len(classes))
        drifts = drift_by_split(binned, splits, ordered=kind != value_types.TEXT)
        columns[name] = with_drifts(replace(columns[name], alone=alone), drifts)
    return columns


def with_drifts(column: ColumnCard, drifts: Mapping[str, DriftTest]) -> ColumnCard:
    return replace(
        column,
        drift={**(column.drift or {}), **{split: each.index for split, each in drifts.items()}},
        drift_chance={**(column.drift_chance or {}), **{split: each.chance for split, each in drifts.items()}},
    )


def target_numbers(column: pa.ChunkedArray, kind: str, classes: tuple[str, ...]) -> np.ndarray:
    """Return the target as class numbers (int64 ``[rows]``), or unchanged (float64) for regression."""
    if not classes:
        return column.to_numpy()
    numbers = {name: number for number, name in enumerate(classes)}
    values = column.to_pylist()
    if kind == value_types.BOOLEAN:
        values = map(bool, values)  # the sample holds them as numbers
    return np.array([numbers.get(value_types.class_label(value), 0) for value in values], np.int64)


def column_warnings(columns: list[ColumnCard]) -> list[str]:
    warnings = []
    drifts = {
        (column.name, split): DriftTest(index, (column.drift_chance or {})[split])
        for column in columns
        for split, index in (column.drift or {}).items()
    }
    for column in columns:
        if column.alone is not None and column.alone >= LEAK:
            warnings.append(
                f"column {column.name!r} has a univariate score of {column.alone:.1%} on held-out rows: if its values "
                "are known only after the target, drop it with data.drop"
            )
    return warnings + [
        f"column {name!r} is distributed differently in {split} (stability index {each.index:.2f})"
        for (name, split), each in significant_drifts(drifts).items()
    ]


def order_warnings(columns: list[ColumnCard]) -> list[str]:
    return [
        f"column {column.name!r} is ordered with the rows, and its univariate score on held-out rows is "
        f"{'unknown' if column.alone is None else format(column.alone, '.1%')}: if it only numbers the rows, drop it "
        "with data.drop"
        for column in columns
        if column.type in value_types.NUMBERS
    ]


def count_duplicates(sample: pa.Table, columns: list[str]) -> dict[str, int]:
    """Count the held-out ``rows`` of the sample, and those that equal a training row in ``columns``."""
    splits = sample[SPLIT].to_numpy()
    hashes = hash_rows([(name, sample[name].combine_chunks()) for name in columns], sample.num_rows)
    held_out = hashes[splits != TRAIN]
    return {"rows": len(held_out), "duplicates": int(np.isin(held_out, hashes[splits == TRAIN]).sum())}


def duplicate_warnings(counts: dict[str, int]) -> list[str]:
    rows, duplicates = counts["rows"], counts["duplicates"]
    if duplicates <= MANY_DUPLICATES * rows:
        return []
    return [
        f"{duplicates:,} of {rows:,} checked held-out rows ({duplicates / rows:.1%}) equal a training row except for "
        "the identifier: if both are the same entity, name its column in data.group, or remove the copies"
    ]
