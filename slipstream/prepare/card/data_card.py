"""The data card: what was found in the data, as ``card.json``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.prepare.card.drift_and_leaks import QUANTILES, column_figures, judgements
from slipstream.prepare.card.duplicates import duplicate_warnings, duplicates
from slipstream.prepare.columns import value_types
from slipstream.prepare.fit.fit import FittedColumns
from slipstream.prepare.fit.scan import SPLIT, ColumnCount, ScanResult
from slipstream.prepare.fit.splits import TRAIN
from slipstream.prepare.source.tables import Source

TOP_VALUES = 20
#: The figures of columns that are of the sample where that is not the whole table; all others are of every row.
OF_SAMPLE = ["distinct numbers", "median", *QUANTILES, "histogram", "drift", "alone"]


def row_counts(read: int, kept: list[int], quarantined: int) -> dict[str, int]:
    return {"read": read, "kept": sum(kept), "quarantined": quarantined, **dict(zip(SPLITS, kept, strict=True))}


def make_card(
    name: str, source: Source, found: ScanResult, fitted: FittedColumns, dropped: list[str]
) -> dict[str, Any]:
    """Figures of columns are of the training rows, except ``missing`` (all rows kept)."""
    sample = found.sample_table()
    learned = int(np.count_nonzero(sample[SPLIT].to_numpy() == TRAIN))
    sampled = sample.num_rows < sum(found.rows)
    types = {column: kind for column, kind in source.types.items() if column not in dropped}
    judged = column_figures(sample, types, fitted.transform.target, fitted.transform.classes)
    columns = [
        describe(column, fitted, found.column(column), kind, sampled) | judged.get(column, {})
        for column, kind in types.items()
    ]
    alike = duplicates(sample, [*fitted.transform.columns, fitted.transform.target])
    judged_inputs = {name: judged[name] for name in fitted.transform.columns}
    columns += [{"name": column, "role": "dropped", "type": source.types[column]} for column in dropped]
    return {
        "source": name,
        "rows": row_counts(source.read, found.rows, len(source.bad) + len(found.bad)),
        "task": fitted.transform.task,
        "target": fitted.transform.target,
        "columns": columns,
        "classes": {
            label: {split: found.classes[index].of.get(label, 0) for index, split in enumerate(SPLITS)}
            for label in fitted.transform.classes
        },
        "sampled_rows": sample.num_rows,
        "of_sample": OF_SAMPLE if sampled else [],
        "rank_error": rank_error(learned) if sampled else 0.0,
        "held_out": alike,
        "warnings": [*source.warnings, *fitted.warnings, *judgements(judged_inputs), *duplicate_warnings(alike)],
    }


def describe(name: str, fitted: FittedColumns, count: ColumnCount, kind: str, sampled: bool) -> dict[str, Any]:
    role = fitted.roles[name]
    column: dict[str, Any] = {"name": name, "role": role.role, "type": kind, "missing": sum(count.missing)}
    if role.why:
        column["why"] = role.why
    if kind == value_types.OTHER:
        return column
    if kind == value_types.TEXT:
        if not count.prose:
            column["distinct"] = len(count.texts.of)
            column["top"] = [list(pair) for pair in count.texts.ranked()[:TOP_VALUES]]
            column["rest"] = sum(count.texts.of.values()) - sum(times for _, times in column["top"])
        return column
    moments = count.moments[TRAIN]
    if sampled:
        column["distinct_of"] = "sample"
    if moments.count:
        column |= {"mean": moments.mean, "std": moments.std, "min": moments.low, "max": moments.high}
    return {key: value for key, value in column.items() if not (isinstance(value, float) and not math.isfinite(value))}


def rank_error(rows: int) -> float:
    """How far the rank of a quantile of a sample of ``rows`` may be from its rank among all rows, as a share of them.

    The bound holds for all quantiles of a column at once with a probability of 95 % (Massart 1990, the tight constant
    of the Dvoretzky-Kiefer-Wolfowitz inequality).
    """
    return math.sqrt(math.log(2 / 0.05) / (2 * max(rows, 1)))
