"""Charts of the report.

:func:`inline_svg` provides the axes and returns the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from slipstream.pipeline.report.pages.inline_svg import (
    CARD,
    INK,
    PIXELS_PER_INCH,
    SERIES,
    SOFT,
    WIDTH,
    inline_svg,
    tooltip,
)
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.evaluation import CalibrationBin, PrecisionRecall, RocCurve, Scatter
from slipstream.shared.artifacts.results.export import ExportReport
from slipstream.shared.artifacts.results.training import History, LiveProgress, LossPoint

LARGEST_CELL = 84.0
#: Shade of a cell above which its text takes the card's (background) colour.
DARK = 0.7
#: Approximate letter width and line height of axis labels, in pixels.
LETTER, LINE_HEIGHT = 7.5, 19.0
LineStyle = dict[str, Any]
#: Dashes of lines that have the same colours.
DASHES = ("-", "--", ":")
REFERENCE_LINE: LineStyle = {"color": SOFT, "linestyle": (0, (4, 3)), "linewidth": 1.2}


@inline_svg
def loss(axes: Axes, history: History | LiveProgress) -> str:
    axes.plot([step.epoch for step in history.steps], [step.loss for step in history.steps], label="training")
    plot_validation(axes, history, "loss")
    legend(axes)
    return "Training and validation loss over the epochs"


@inline_svg
def validation_metric(axes: Axes, history: History, metric: str) -> str:
    plot_validation(axes, history, metric)
    axes.yaxis.set_major_formatter(percent if metric in fmt.SHARES else number)
    return f"Validation {fmt.NAMES.get(metric, metric)} over the epochs"


@inline_svg
def learning_rate(axes: Axes, history: History | LiveProgress) -> str:
    axes.plot([step.epoch for step in history.steps], [step.learning_rate for step in history.steps])
    over_epochs(axes)
    return "Learning rate over the epochs"


@inline_svg
def overlaid(axes: Axes, histories: Mapping[str, History], key: str) -> str:
    """Plot a curve of several trainings: "training" for the training loss, else of their evaluations."""
    for number, (name, history) in enumerate(histories.items()):
        points = history.steps if key == "training" else history.evaluations
        values = [each.loss if isinstance(each, LossPoint) else getattr(each, key) for each in points]
        style = DASHES[number // len(SERIES) % len(DASHES)]
        axes.plot([each.epoch for each in points], values, label=name, linestyle=style, alpha=0.85)
    over_epochs(axes)
    legend(axes, columns=1)
    return f"{'Training loss' if key == 'training' else f'Validation {fmt.NAMES.get(key, key)}'} of each run"


def plot_validation(axes: Axes, history: History | LiveProgress, key: str) -> None:
    """Plot the evaluations as a line and mark the best, whose weights were kept."""
    points = [(each, value) for each in history.evaluations if (value := getattr(each, key)) is not None]
    axes.plot([each.epoch for each, _ in points], [value for _, value in points], color=SERIES[1], label="validation")
    for best, value in ((each, value) for each, value in points if history.best and each.step == history.best.step):
        words = f"best: {fmt.metric(key, value)} at step {fmt.count(best.step)}"
        plot_point(axes, best.epoch, value, SERIES[1], words)
    over_epochs(axes)


def over_epochs(axes: Axes) -> None:
    axes.set_xlabel("epoch")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(number)
    axes.yaxis.set_major_formatter(number)


@inline_svg
def confusion_matrix(axes: Axes, counts: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """Plot true classes (down) against predicted classes (across).

    The shade is the share of the class's rows.
    """
    labels = [fmt.shorten_label(name) for name in classes]
    longest, size = LETTER * max(len(label) for label in labels), len(labels)
    cell = min(LARGEST_CELL, (WIDTH - longest - 2 * LINE_HEIGHT) / size)
    upright = longest > cell
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            words = f"{classes[row]} predicted as {classes[column]}: {fmt.rows(count)}"
            plot_cell(axes, row, column, count, count / (sum(line) or 1), words, 0.36 * cell)
    ticks = [index + 0.5 for index in range(size)]
    axes.set_xticks(ticks, labels, rotation=90 if upright else 0)
    axes.set_yticks(ticks, labels)
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xlabel="predicted class", ylabel="true class")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    height = cell * size + (longest if upright else 0) + 3 * LINE_HEIGHT
    figure_of(axes).set_figheight(height / PIXELS_PER_INCH)
    return f"Confusion matrix of {size} classes"


def plot_cell(axes: Axes, row: int, column: int, count: int, share: float, words: str, size: float) -> None:
    """Plot one cell of a confusion matrix with its count, in a font of about ``size`` pixels."""
    axes.add_patch(
        Rectangle(
            (column + 0.02, row + 0.02),
            width=0.96,
            height=0.96,
            facecolor=SERIES[0 if row == column or not count else 1],
            alpha=max(share, 0.04),
            linewidth=0,
            gid=tooltip(f"{words} ({fmt.percent(share)})"),
        )
    )
    if count:
        text, colour = fmt.count(count), CARD if share > DARK else INK
        fitted = min(14.0, max(6.0, size))
        axes.text(column + 0.5, row + 0.5, text, color=colour, size=fitted, ha="center", va="center_baseline")


@inline_svg
def roc_curve(axes: Axes, roc: RocCurve, positive: str) -> str:
    axes.plot(roc.fpr, roc.tpr, label=f"model, class {fmt.shorten_label(positive)}")
    axes.plot([0, 1], [0, 1], label="chance", **REFERENCE_LINE)
    unit_square(axes)
    axes.set(xlabel="false positive rate", ylabel="true positive rate")
    legend(axes)
    return "ROC curve of the model and of chance"


@inline_svg
def precision_recall_curve(axes: Axes, curve: PrecisionRecall) -> str:
    axes.step(curve.recall, curve.precision, where="pre", label=f"model, class {fmt.shorten_label(curve.positive)}")
    axes.plot([0, 1], [curve.rate, curve.rate], label="chance", **REFERENCE_LINE)
    unit_square(axes)
    axes.set(xlabel="recall", ylabel="precision")
    legend(axes)
    return "Precision by recall of the model and of chance"


@inline_svg
def reliability_diagram(axes: Axes, bins: Sequence[CalibrationBin]) -> str:
    """Plot accuracy with its interval against mean confidence per confidence bin.

    The area of a mark is the bin's share of the rows.
    """
    rows = sum(each.rows for each in bins)
    sure, right = [each.confidence for each in bins], [each.accuracy for each in bins]
    axes.plot(sure, right, label="model (larger: more rows)")
    for each in bins:
        confidence, accuracy = fmt.percent(each.confidence), fmt.percent(each.accuracy)
        within = f"{fmt.percent(each.low)} to {fmt.percent(each.high)}"
        words = f"{fmt.rows(each.rows)}: confidence {confidence}, accuracy {accuracy} ({within})"
        axes.plot([each.confidence, each.confidence], [each.low, each.high], color=SERIES[0], linewidth=1.5, alpha=0.45)
        diameter = 5 + 12 * math.sqrt(each.rows / rows)
        plot_point(axes, each.confidence, each.accuracy, SERIES[0], words, diameter)
    axes.plot([0, 1], [0, 1], label="perfectly calibrated", **REFERENCE_LINE)
    unit_square(axes)
    axes.set(xlabel="confidence", ylabel="accuracy")
    legend(axes)
    return "Reliability diagram: accuracy against confidence"


@inline_svg
def predicted_against_actual(axes: Axes, scatter: Scatter, target: str) -> str:
    values = [*scatter.actual, *scatter.predicted]
    ends = [min(values), max(values)]
    dots: LineStyle = {"linestyle": "", "marker": "o", "markersize": 4, "markeredgewidth": 0, "alpha": 0.45}
    axes.plot(scatter.actual, scatter.predicted, label="test rows", **dots)
    axes.plot(ends, ends, label="predicted = actual", **REFERENCE_LINE)
    axes.set(xlabel=f"actual {fmt.shorten_label(target)}", ylabel="predicted")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(number)
    axes.yaxis.set_major_formatter(number)
    legend(axes)
    return "Predicted against actual values"


@inline_svg
def quality_against_latency(axes: Axes, export: ExportReport) -> str:
    """Plot the loss against FP32 with its limits over the median latency at the deciding batch size.

    The chosen variant is filled. A solid line joins the Pareto front (no other variant is both faster and better); a
    dashed line shows the allowed loss.
    """
    batch = str(export.decided_at_batch)
    measured = [
        (ms, variant.quality, variant)
        for variant in export.variants
        if variant.file and (ms := variant.milliseconds(batch, "p50"))
    ]
    points = [(ms, quality.loss if quality else 0.0) for ms, quality, _ in measured]
    axes.plot(*zip(*pareto_front(points), strict=True), color=SERIES[0], label="Pareto front")
    for ms, quality, variant in measured:
        loss = quality.loss if quality else 0.0
        # An unbounded interval would leave no height for the others.
        if quality and max(-quality.low, quality.high) < fmt.NO_LIMIT:
            axes.plot([ms, ms], [quality.low, quality.high], color=SERIES[1], linewidth=1.5)
        words = f"{variant.name}: {fmt.milliseconds(ms)}, loss {loss:.2f}, {variant.verdict}"
        plot_point(axes, ms, loss, SERIES[1] if quality else SERIES[0], words, 9.0 if variant.chosen else 6.0)
        if variant.chosen:
            axes.plot([ms], [loss], linestyle="", marker="o", markersize=5, color=SERIES[0], zorder=4, label="chosen")
    axes.axhline(export.max_loss, label="allowed", **REFERENCE_LINE)
    axes.margins(x=0.08, y=0.08)
    unit = "% of RMSE" if export.task == "regression" else "points of accuracy"
    axes.set(xlabel=f"ms per call of batch {batch}", ylabel=f"{unit} lost")
    axes.locator_params(axis="x", nbins=5)  # times within a few percent have long labels
    axes.xaxis.set_major_formatter(number)
    axes.yaxis.set_major_formatter(number)
    legend(axes)
    return "Quality against latency of the variants"


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other undercuts in both numbers, by the first number."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def unit_square(axes: Axes) -> None:
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.xaxis.set_major_formatter(percent)
    axes.yaxis.set_major_formatter(percent)


def plot_point(axes: Axes, x: float, y: float, colour: str, words: str, diameter: float = 6.0) -> None:
    ring: LineStyle = {"markerfacecolor": CARD, "markeredgecolor": colour, "markeredgewidth": 2}
    axes.plot([x], [y], linestyle="", marker="o", markersize=diameter, gid=tooltip(words), zorder=3, **ring)


def legend(axes: Axes, columns: int = 2) -> None:
    figure_of(axes).legend(loc="outside upper left", ncols=columns, columnspacing=1.4)


def figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def number(value: float, _: float = 0) -> str:
    """Return a tick label without trailing zeros."""
    return f"{value:,.10g}" if value == 0 or 1e-4 <= abs(value) < 1e9 else f"{value:.4g}"


def percent(share: float, _: float = 0) -> str:
    return f"{100 * share:.4g} %"
