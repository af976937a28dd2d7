"""Permutation importance of the columns, and the worst errors, on the test rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.evaluation import ColumnImportance, WorstError
from slipstream.shared.models import metrics
from slipstream.shared.models.decision import with_threshold
from slipstream.shared.models.predict import ModelFunction, predict_records, record_targets
from slipstream.shared.source.columns.transform import (
    FIRST,
    MISSING,
    CategoricalColumn,
    NumericColumn,
    Transform,
    decode_numbers,
)
from slipstream.shared.source.columns.value_types import INTEGER, TIMES

#: Permutations of every column, and their seed.
REPEATS, SEED = 5, 0
#: Limits of all predictions together: rows, and rows times parameters. Fewer test rows than ``FEWEST`` explain nothing.
MOST_ROWS, MOST_WORK, FEWEST = 200_000, 2 * 10**10, 100
#: Number of listed errors, and of columns that describe their rows.
ERRORS, DESCRIBED = 8, 3


def column_inputs(transform: Transform) -> dict[str, list[tuple[str, int]]]:
    """Return the inputs that every raw column fills: field of the records, and place in it."""
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in transform.columns}
    for place, number in enumerate(transform.numeric):
        found[number.name].append(("numeric", place))
    for place, name in enumerate(transform.indicators, start=len(transform.numeric)):
        found[name].append(("numeric", place))
    for place, category in enumerate(transform.categorical):
        found[category.name].append(("categorical", place))
    for place, name in enumerate(transform.documents):
        found[name].append(("tokens", place))
    return found


def table_transform(data: PreparedData) -> Transform | None:
    """Return the preparation of a table; None for other data."""
    if "statistics.json" not in data.artifact.files:
        return None
    statistics = data.artifact.read_json("statistics.json")
    return Transform.from_json(statistics) if "types" in statistics else None


def column_importance(
    run: ModelFunction,
    signature: Signature,
    transform: Transform,
    records: np.ndarray,
    parameters: int,
    threshold: float | None = None,
) -> list[ColumnImportance] | None:
    """Return how much worse the headline metric is with each column permuted, the largest first.

    All inputs of a column are permuted together (Breiman 2001, as in scikit-learn). Rows are a spread sample;
    None if too few would remain.
    """
    inputs = column_inputs(transform)
    most = min(MOST_ROWS, MOST_WORK // max(1, parameters)) // max(1, REPEATS * len(inputs))
    if min(most, len(records)) < FEWEST:
        return None
    records = records[np.unique(np.linspace(0, len(records) - 1, most).astype(int))]
    truth, draw = record_targets(records), np.random.default_rng(SEED)

    def cost(rows: np.ndarray) -> float:
        outputs = predict_records(run, signature, rows)
        if signature.task == "regression":
            return metrics.regression_scores(outputs[:, 0], truth).of("rmse") or 0.0
        return float(np.mean(with_threshold(outputs, threshold).argmax(axis=1) != truth))

    whole, found = cost(records), list[ColumnImportance]()
    for name, places in inputs.items():
        losses = []
        for _ in range(REPEATS):
            order, permuted = draw.permutation(len(records)), records.copy()
            for field, place in places:
                permuted[field][:, place] = records[field][order, place]
            losses.append(cost(permuted) - whole)
        found.append(ColumnImportance(name, float(np.mean(losses)), float(np.std(losses))))
    return sorted(found, key=lambda each: (-each.loss, each.name))


def worst_errors(
    signature: Signature,
    outputs: np.ndarray,
    records: np.ndarray,
    threshold: float | None,
    describe: Callable[[int], dict[str, str]],
) -> list[WorstError]:
    """Return the wrong rows with the most likely wrong class, or those with the largest absolute error.

    ``describe`` returns values of a row's columns.
    """
    truth = record_targets(records)
    if signature.task == "regression":
        sizes = np.abs(outputs[:, 0].astype(np.float64) - truth)
        named = [f"{value:.6g}" for value in truth], [f"{value:.6g}" for value in outputs[:, 0]]
    else:
        decided = with_threshold(outputs, threshold).argmax(axis=1)
        likely = metrics.softmax(outputs)[np.arange(len(outputs)), decided]
        sizes = np.where(decided == truth, 0.0, likely)
        named = [signature.classes[each] for each in truth], [signature.classes[each] for each in decided]
    order = np.argsort(-sizes, kind="stable")[:ERRORS]
    return [
        WorstError(int(row) + 1, named[0][row], named[1][row], float(sizes[row]), describe(int(row)))
        for row in order
        if sizes[row] > 0
    ]


def row_values(transform: Transform, record: np.void, names: list[str]) -> dict[str, str]:
    """Return the values of the columns ``names`` in a prepared row."""
    found: dict[str, str] = {}
    for place, number in enumerate(transform.numeric):
        if number.name in names and not number.part:
            marked = number.indicator and record["numeric"][indicator_place(transform, number.name)] == 1
            text = number_text(number, record["numeric"][place], transform.types[number.name])
            found[number.name] = "missing" if marked else text
    for place, category in enumerate(transform.categorical):
        if category.name in names:
            found[category.name] = category_text(category, int(record["categorical"][place]))
    return {name: found[name] for name in names if name in found}


def indicator_place(transform: Transform, name: str) -> int:
    return len(transform.numeric) + transform.indicators.index(name)


def number_text(number: NumericColumn, standard: np.float32, kind: str) -> str:
    if standard == 0 and not number.indicator:
        return "missing or average"
    value = float(decode_numbers(np.array([standard]), kind, number.mean, number.std, number.curve, number.scale)[0])
    if kind in TIMES:
        return str(np.datetime64(round(value), "s")) if abs(value) < 1e11 else "missing"
    return f"{value:.0f}" if kind == INTEGER else f"{value:.6g}"


def category_text(category: CategoricalColumn, code: int) -> str:
    return {MISSING: "missing"}.get(code) or (category.vocabulary[code - FIRST] if code >= FIRST else "unknown text")
