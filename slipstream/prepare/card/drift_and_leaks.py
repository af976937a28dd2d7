"""What the sample says of each column: its distribution, its drift between splits, what it tells of the target alone.

A table of up to ``memory.SAMPLE_ROWS`` rows is its own sample, and then all this is exact. Of larger tables
the quantiles are the sample's, and the card states the error of their rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.artifacts.prepared.data import SPLITS
from slipstream.prepare.columns import value_types
from slipstream.prepare.fit.scan import SPLIT
from slipstream.prepare.fit.splits import TRAIN

BINS = 20
QUANTILES = {"p1": 0.01, "p25": 0.25, "p75": 0.75, "p99": 0.99}
#: A population stability index above this is called a drift (Siddiqi, Credit Risk Scorecards, 2006).
DRIFT = 0.25
#: A column that alone explains this share of what there is to explain is called a leak.
LEAK = 0.98
#: Fewer held-out rows say too little about drift or leaks.
ENOUGH = 50


def distribution(rising: np.ndarray) -> dict[str, Any]:
    """Quantiles and a histogram of sorted numbers: ``edges`` (one more than) ``counts``, without the outermost 1 %."""
    if len(rising) == 0:
        return {}
    low, high, *found = quantiles(rising, np.array([0.005, 0.995, *QUANTILES.values()])).tolist()
    inside = rising[np.searchsorted(rising, low) : np.searchsorted(rising, high, side="right")]
    try:
        counts, edges = np.histogram(inside, BINS if high > low else 1)
    except ValueError:
        # There are fewer floating point numbers between the two than bins.
        counts, edges = np.histogram(inside, [low, np.nextafter(high, np.inf)])
    figures = dict(zip(QUANTILES, found, strict=True))
    median = float(rising[(len(rising) - 1) // 2] + rising[len(rising) // 2]) / 2
    return {**figures, "median": median, "histogram": {"edges": edges.tolist(), "counts": counts.tolist()}}


def quantiles(rising: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Of sorted numbers, with linear interpolation, as ``numpy.quantile`` without its sorting."""
    return np.interp(shares * (len(rising) - 1), np.arange(len(rising)), rising)


def bins(column: np.ndarray, rising: np.ndarray, new: np.ndarray) -> np.ndarray:
    """A small whole number for each value (int64 ``[rows]``, 0 for missing), cut by the sorted training values, among
    which another value begins at the places ``new``."""
    if len(rising) == 0:
        return np.zeros(len(column), np.int64)
    # Few values are their own bins.
    edges = rising[new] if len(new) < 3 * BINS else quantiles(rising, np.linspace(0, 1, BINS + 1)[1:-1])
    return np.where(np.isnan(column), 0, 1 + np.searchsorted(edges, column, side="right"))


def text_bins(column: pa.ChunkedArray) -> np.ndarray:
    """A whole number for each distinct text (int64 ``[rows]``), 0 for missing."""
    encoded = column.combine_chunks().dictionary_encode()
    return pc.fill_null(pc.add(encoded.indices, 1), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def drift(places: np.ndarray, splits: np.ndarray) -> dict[str, float]:
    """The population stability index of each held-out split against the training rows."""
    both = np.bincount(places * len(SPLITS) + splits, minlength=len(SPLITS) * (int(places.max(initial=0)) + 1))
    counts = both.reshape(-1, len(SPLITS)).T
    found = {}
    for index, name in enumerate(SPLITS):
        if index == TRAIN or counts[index].sum() < ENOUGH:
            continue
        shares = [smoothed(counts[which]) for which in (TRAIN, index)]
        found[name] = float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))
    return found


class ColumnDrift(NamedTuple):
    """The stability index of a column against an earlier one, and a word on it if it is large."""

    stability: float
    words: list[str]


def drift_from(column: dict[str, Any], sample: pa.Table, name: str) -> ColumnDrift | None:
    """How the values of all rows of the ``sample`` differ from the ``column`` of an earlier card, where it can be said:
    by the bins of its histogram, or by its most frequent texts and all others together."""
    if "histogram" in column:
        numbers = sample[name].drop_null().to_numpy()
        edges = np.array(column["histogram"]["edges"])
        before = np.array(column["histogram"]["counts"], float)
        now = np.histogram(numbers[(numbers >= edges[0]) & (numbers <= edges[-1])], edges)[0]
        # The histogram leaves out the outermost 1 %, so what lies there counts by how much more it is.
        before = np.append(before, 0.01 / 0.99 * before.sum())
        now = np.append(now, len(numbers) - now.sum())
    elif column.get("top"):
        top = [text for text, _ in column["top"]]
        found = pc.index_in(sample[name].drop_null().combine_chunks(), value_set=pa.array(top))
        places = pc.fill_null(found, len(top)).to_numpy(zero_copy_only=False)
        before = np.array([count for _, count in column["top"]] + [column.get("rest", 0)], float)
        now = np.bincount(places, minlength=len(top) + 1)
    else:
        return None
    if now.sum() < ENOUGH:
        return None
    shares = smoothed(before), smoothed(now)
    index = float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))
    words = f"column {name!r} is distributed differently than in the earlier data (stability index {index:.2f})"
    return ColumnDrift(index, [words] if index > DRIFT else [])


def smoothed(counts: np.ndarray) -> np.ndarray:
    return (counts + 0.5) / (counts.sum() + 0.5 * len(counts))


class LabelledRows(NamedTuple):
    """The training rows of the sample, or those that are held out, with their target: class numbers (int64), or numbers
    (float64)."""

    rows: np.ndarray
    target: np.ndarray


def predicts_alone(places: np.ndarray, train: LabelledRows, held_out: LabelledRows, classes: int) -> float | None:
    """Of what is to be explained in held-out rows, the share that this one column explains; at least 0.

    Each bin predicts what its training rows have most often (or on average); compared with the one best constant:
    errors saved for classes, variance saved for numbers. ``None`` if too few rows are held out.
    """
    if len(held_out.rows) < ENOUGH:
        return None
    size = int(places.max(initial=0)) + 1
    learned, asked = places.take(train.rows), places.take(held_out.rows)
    if classes:
        table = np.bincount(learned * classes + train.target, minlength=size * classes).reshape(size, classes)
        best = np.where(table.sum(axis=1) > 0, table.argmax(axis=1), table.sum(axis=0).argmax())
        wrong = np.mean(best.take(asked) != held_out.target)
        base = np.mean(held_out.target != table.sum(axis=0).argmax())
    else:
        overall = train.target.mean()
        count = np.bincount(learned, minlength=size)
        total = np.bincount(learned, train.target, minlength=size)
        mean = np.where(count > 0, total / np.maximum(count, 1), overall)
        wrong = np.mean((mean.take(asked) - held_out.target) ** 2)
        base = np.mean((overall - held_out.target) ** 2)
    return max(0.0, float(1 - wrong / base)) if base > 0 else None


def column_figures(
    sample: pa.Table, types: dict[str, str], target: str, classes: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """For each column that can be judged: its distribution, ``drift`` by split and ``alone``."""
    splits = sample[SPLIT].to_numpy()
    truth = target_numbers(sample[target], types[target], classes)
    halves = [np.flatnonzero(splits == TRAIN), np.flatnonzero(splits != TRAIN)]
    train, held_out = (LabelledRows(rows, truth.take(rows)) for rows in halves)
    found: dict[str, dict[str, Any]] = {}
    for name, kind in types.items():
        if kind == value_types.OTHER:
            continue
        figures: dict[str, Any] = {}
        if kind == value_types.TEXT:
            places = text_bins(sample[name])
        else:
            numbers = sample[name].to_numpy()
            learned = numbers.take(train.rows)
            rising = np.sort(learned[~np.isnan(learned)])
            new = np.flatnonzero(rising[1:] != rising[:-1]) + 1
            places = bins(numbers, rising, new)
            figures = {"distinct": len(new) + bool(len(rising)), **distribution(rising)}
        figures["drift"] = drift(places, splits)
        if name != target:
            alone = predicts_alone(places, train, held_out, len(classes))
            figures |= {} if alone is None else {"alone": alone}
        found[name] = figures
    return found


def target_numbers(column: pa.ChunkedArray, kind: str, classes: tuple[str, ...]) -> np.ndarray:
    """The target as class numbers (int64 ``[rows]``) or as it is (float64)."""
    if not classes:
        return column.to_numpy()
    places = {name: place for place, name in enumerate(classes)}
    names = column.to_pylist()
    return np.array([places.get(value_types.label(named(v, kind)), 0) for v in names], np.int64)


def named(value: Any, kind: str) -> Any:
    """The sample holds booleans as numbers; classes are named by their values."""
    return bool(value) if kind == value_types.BOOLEAN else value


def judgements(found: dict[str, dict[str, Any]]) -> list[str]:
    """A word on leaks and drifts."""
    words = []
    for name, figures in found.items():
        if figures.get("alone", 0) >= LEAK:
            words.append(
                f"column {name!r} alone explains {figures['alone']:.1%} of the target in held-out rows: if it is known "
                "only afterwards, leave it out with data.drop"
            )
        moved = {split: index for split, index in figures["drift"].items() if index > DRIFT}
        for split, index in moved.items():
            words.append(f"column {name!r} is distributed differently in {split} (stability index {index:.2f})")
    return words
