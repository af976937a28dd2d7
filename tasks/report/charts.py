"""The pictures of the report, each from what one stage found out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tasks.report import units
from tasks.report.markup import Markup
from tasks.report.svg import Axis, Cell, Series, chart, matrix

#: More classes than this are shown as lists: their matrix would be too fine to read.
MOST_CLASSES_DRAWN = 20
LABEL_LETTERS = 14


def loss_chart(history: dict[str, Any]) -> Markup:
    """Loss of training and validation over the epochs, the best evaluation marked."""
    steps = [s for s in history["steps"] if s["loss"] is not None]
    shown = [
        Series("training", 0, [s["epoch"] for s in steps], [s["loss"] for s in steps]),
        validation_series(history, "loss", 1),
    ]
    return chart(shown, Axis("epoch", number, low=0), Axis("", number), "Loss over the epochs")


def metric_chart(history: dict[str, Any], metric: str) -> Markup:
    """The metric on the validation split over the epochs, the best evaluation marked."""
    spell = percent if metric in units.SHARES else number
    name = units.NAMES.get(metric, metric)
    return chart(
        [validation_series(history, metric, 1)],
        Axis("epoch", number, low=0),
        Axis("", spell),
        f"Validation {name} over the epochs",
    )


def validation_series(history: dict[str, Any], key: str, colour: int) -> Series:
    found = [e for e in history["evaluations"] if e.get(key) is not None]
    best = history.get("best", {}).get("step")
    marks = {
        index: f"best: {units.metric(key, e[key])} at step {units.count(e['step'])}"
        for index, e in enumerate(found)
        if e["step"] == best
    }
    return Series("validation", colour, [e["epoch"] for e in found], [e[key] for e in found], marks=marks)


def confusion_chart(confusion: list[list[int]], classes: Sequence[str]) -> Markup:
    """Counts by truth (rows) and prediction (columns); the shade is the share of the row."""
    labels = [shortened(label) for label in classes]
    cells = []
    for r, line in enumerate(confusion):
        total = sum(line) or 1
        cells.append(
            [
                Cell(
                    count / total if count else 0.04,
                    units.count(count) if count else "",
                    r == c or not count,
                    f"{classes[r]} taken for {classes[c]}: {units.rows(count)} ({units.percent(count / total)})",
                )
                for c, count in enumerate(line)
            ]
        )
    return matrix(cells, labels, "truth", "prediction", "Confusion matrix")


def roc_chart(roc: dict[str, list[float]], positive: str) -> Markup:
    shown = [
        Series(f"the model, for {shortened(positive)}", 0, roc["fpr"], roc["tpr"]),
        Series("a coin", 4, [0, 1], [0, 1], dashed=True),
    ]
    return chart(
        shown,
        Axis("false positive rate", percent, low=0, high=1),
        Axis("true positive rate", percent, low=0, high=1),
        "Receiver operating characteristic",
    )


def calibration_chart(bins: list[dict[str, Any]]) -> Markup:
    """How often the model is right against how sure it was, one point per interval of confidence."""
    rows = sum(b["rows"] for b in bins)
    marks = {
        index: f"{units.rows(b['rows'])}: {units.percent(b['confidence'])} sure, {units.percent(b['accuracy'])} right"
        for index, b in enumerate(bins)
    }
    radii = {index: 2.5 + 6 * math.sqrt(b["rows"] / rows) for index, b in enumerate(bins)}
    sure, right = [b["confidence"] for b in bins], [b["accuracy"] for b in bins]
    shown = [
        Series("the model; the larger, the more rows", 0, sure, right, marks=marks, radii=radii),
        Series("as sure as right", 4, [0, 1], [0, 1], dashed=True),
    ]
    return chart(
        shown, Axis("how sure", percent, low=0, high=1), Axis("how often right", percent, low=0, high=1), "Calibration"
    )


def scatter_chart(scatter: dict[str, list[float]], target: str) -> Markup:
    """Predicted against actual values, with the line on which they would be equal."""
    values = [*scatter["actual"], *scatter["predicted"]]
    ends = [min(values), max(values)]
    shown = [
        Series("test rows", 0, scatter["actual"], scatter["predicted"], dots=True),
        Series("predicted = actual", 4, ends, ends, dashed=True),
    ]
    return chart(
        shown, Axis(f"actual {shortened(target)}", number), Axis("predicted", number), "Predicted against actual"
    )


def bandwidth_chart(profile: dict[str, Any]) -> Markup:
    """Bus bandwidth over the size, one line per operation."""
    shown = [
        Series(name, colour, [m["bytes"] for m in found], [m["busbw_gbps"] for m in found], marks=tips(found))
        for colour, (name, found) in enumerate(by_operation(profile).items())
    ]
    return chart(shown, size_axis(profile), Axis("GB/s", number, low=0), "Bus bandwidth by size")


def time_chart(profile: dict[str, Any]) -> Markup:
    """Median time of a call over the size; the band is the 10th to 99th percentile of the first one."""
    shown = []
    for colour, (name, found) in enumerate(by_operation(profile).items()):
        band = ([m["p10_us"] for m in found], [m["p99_us"] for m in found]) if colour == 0 else None
        sizes, medians = [m["bytes"] for m in found], [m["p50_us"] for m in found]
        shown.append(Series(name, colour, sizes, medians, band=band))
    times = Axis("", duration, log=10)
    return chart(shown, size_axis(profile), times, "Time of a call by size")


def size_axis(profile: dict[str, Any]) -> Axis:
    sizes = [m["bytes"] for m in profile["measurements"]]
    return Axis("size of the message", lambda size: units.message_size(int(size)), min(sizes), max(sizes), log=4)


def by_operation(profile: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for measurement in profile["measurements"]:
        found.setdefault(measurement["operation"], []).append(measurement)
    return found


def tips(measurements: list[dict[str, Any]]) -> dict[int, str]:
    return {
        index: f"{m['operation']}, {units.message_size(m['bytes'])}: {units.bandwidth(m['busbw_gbps'])}, "
        f"{units.microseconds(m['p50_us'])} (p99 {units.microseconds(m['p99_us'])})"
        for index, m in enumerate(measurements)
    }


def shortened(label: str) -> str:
    return label if len(label) <= LABEL_LETTERS else f"{label[: LABEL_LETTERS - 1]}…"


def number(value: float) -> str:
    """A tick: as short as it can be."""
    return f"{value:,.10g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.0e}"


def duration(microseconds: float) -> str:
    """A tick at a power of ten."""
    names = (("s", 1e6), ("ms", 1e3), ("µs", 1.0))
    name, unit = next((found for found in names if microseconds >= found[1]), names[-1])
    return f"{microseconds / unit:g} {name}"


def percent(share: float) -> str:
    return f"{100 * share:.4g} %"
