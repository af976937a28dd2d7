"""Report page of a run.

The text is in ``templates/report.html``. This module computes values that the results lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Any

from markupsafe import Markup

from slipstream.pipeline.report.against_interconnect import against_interconnect
from slipstream.pipeline.report.pages.rendering import render_page
from slipstream.pipeline.report.run_directory import CARD, flat
from slipstream.pipeline.report.stage_results import StageResults
from slipstream.pipeline.report.summary import RunSummary
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.results.devices import Bottleneck, TrainingDevices
from slipstream.shared.artifacts.results.evaluation import ColumnImportance, Evaluation
from slipstream.shared.artifacts.results.sweep import STATES, Sweep, SweepTrial
from slipstream.shared.artifacts.results.training import TRACE
from slipstream.shared.artifacts.versions import closure_version
from slipstream.shared.artifacts.workspaces import ArtifactStore, content_key
from slipstream.shared.comparison.baseline import against_baseline, unbalanced_figures

#: Names of a step's phases on the page.
PHASES = {
    "data": "waiting for batches",
    "compute": "forward and backward pass",
    "exchange": "waiting for the exchange",
    "optimizer": "optimiser",
    "rest": "between steps",
}
WORST_SHOWN = 12
CLASSES_SHOWN = CLASSES_SCORED = 12
#: Fewest points of a chart.
FEWEST_POINTS = 3
REASONS_SHOWN = 8
VALUES_SHOWN = 3
TRIALS_SHOWN = 20
#: Number of columns listed at first, and after unfolding.
COLUMNS_SHOWN, COLUMNS_LISTED = 16, 400


def report_page(
    summary: RunSummary,
    results: StageResults,
    config: Mapping[str, object],
    made_at: datetime,
    store: ArtifactStore | None = None,
    changed: Mapping[str, object] = MappingProxyType({}),
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the report page.

    ``config`` is the whole configuration by section, ``changed`` what differs from the defaults. ``made_at`` is local
    time. Charts are cached in ``store``. ``links`` are names and paths of other files of the run.
    """
    evaluation, columns = results.evaluation, results.card["columns"]
    confusion, classes = evaluation.confusion, evaluation.classes
    listed = confusion if len(classes) > MOST_CLASSES_DRAWN else None
    return render_page(
        "report.html",
        summary=summary,
        results=results,
        export=results.export,
        metric=evaluation.metric.name,
        metric_of_rows=evaluation.metric_of_rows,
        charts=stored_charts(results, store),
        against=against_baseline(evaluation),
        unbalanced=unbalanced_figures(evaluation),
        recommended=results.export.recommended,
        scores=list(scores(evaluation)),
        importance=importance_of_columns(evaluation),
        mistakes=most_frequent_mistakes(listed, classes) if listed else None,
        recalls=class_scores(confusion, classes)[:CLASSES_SCORED] if confusion else [],
        classes=class_frequencies(results.card["classes"])[:CLASSES_SHOWN],
        columns=columns[:COLUMNS_SHOWN],
        more_columns=columns[COLUMNS_SHOWN:COLUMNS_LISTED],
        columns_left=len(columns) - COLUMNS_LISTED,
        contents=describe_column,
        exchange=exchange_of(results),
        searched=charts_of_sweep(summary.sweep) if summary.sweep else {},
        importance_lines=importance_lines,
        listed_trials=listed_trials,
        time_lines=time_lines,
        nodes_of=nodes_of,
        reasons=results.quarantined[:REASONS_SHOWN],
        changed=list(flat(changed)),
        links=links,
        sections={name: list(flat(value)) for name, value in config.items() if isinstance(value, Mapping)},
        card_page=CARD,
        trace_file=TRACE,
        made=made_at,
    )


def time_lines(found: Bottleneck) -> list[tuple[str, float, str]]:
    """Return name, share of time and text for every phase of a step and for the time between steps.

    Phases are means over all ranks.
    """
    between = found.seconds - sum(found.phases.values())
    seconds = {PHASES.get(name, name): value for name, value in found.phases.items()}
    seconds["evaluations and checkpoints"] = max(0.0, between)
    return [
        (name, value / found.seconds, f"{fmt.seconds(value)}, {100 * value / found.seconds:.0f} %")
        for name, value in seconds.items()
    ]


def charts_of_sweep(sweep: Sweep) -> dict[str, Markup]:
    # Imports drawing libraries, which a report with cached charts does not need.
    from slipstream.pipeline.report.pages import sweep_charts

    return sweep_charts.sweep_charts(sweep)


def importance_lines(sweep: Sweep) -> list[tuple[str, float, str]]:
    """Return a setting, its share of the importance, and the share as text for every bar."""
    return [(name, share, fmt.percent(share)) for name, share in sweep.importance.items()]


def listed_trials(sweep: Sweep) -> list[SweepTrial]:
    """Return the best trials, then others by state, failed trials last.

    The trial with the unchanged configuration is always included.
    """
    order = {state: place for place, state in enumerate(STATES)}
    ranked = sorted(sweep.trials, key=lambda each: (order[each.state], each.loss is None, each.loss or 0.0))
    shown = ranked[:TRIALS_SHOWN]
    return shown + [each for each in ranked if each.is_given and each not in shown]


def exchange_of(results: StageResults) -> str:
    found, network = results.attempt.bottleneck, results.network
    return against_interconnect(found, network.profile) if found and network else ""


def nodes_of(devices: TrainingDevices, attempt: int) -> str:
    """Return the names of an attempt's sampled nodes as text."""
    return ", ".join(dict.fromkeys(pod.node for pod in devices.pods if pod.attempt == attempt)) or fmt.UNKNOWN


@dataclass(frozen=True)
class MetricScore:
    """Metric of the model and of the baseline.

    ``better`` is 1 if the model is significantly better, -1 if the baseline is, else 0.
    """

    metric: str
    model: float | None
    baseline: float | None
    better: int


def scores(evaluation: Evaluation) -> Iterator[MetricScore]:
    """Yield every metric of the model in the order of :data:`slipstream.shared.formatting.NAMES`."""
    for metric in sorted(evaluation.metric_names, key=list(fmt.NAMES).index):
        # Only the headline metric has an interval.
        better = evaluation.gain.shown if metric == evaluation.metric.name else 0
        yield MetricScore(metric, evaluation.model.of(metric), evaluation.baseline.of(metric), better)


def importance_of_columns(evaluation: Evaluation) -> list[tuple[str, float, str]]:
    """Return name, bar length and text of the most important columns; empty if unknown."""
    found = (evaluation.importance or [])[:WORST_SHOWN]
    longest = max((each.loss for each in found), default=0.0) or 1.0
    in_points = evaluation.metric.name == "accuracy"

    def text(each: ColumnImportance) -> str:
        if in_points:
            return f"{100 * each.loss:.2f} ± {100 * each.std:.2f} points"
        return f"{each.loss:.3g} ± {each.std:.2g}"

    return [(fmt.shorten_label(each.name), max(0.0, each.loss / longest), text(each)) for each in found]


def most_frequent_mistakes(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return true class, predicted class and rows of the largest off-diagonal entries."""
    wrong = [(n, r, c) for r, line in enumerate(counts) for c, n in enumerate(line) if n and r != c]
    worst = sorted(wrong, key=lambda mistake: (-mistake[0], mistake[1], mistake[2]))[:WORST_SHOWN]
    return [(classes[r], classes[c], n) for n, r, c in worst]


@dataclass(frozen=True)
class ClassScores:
    """Precision and recall of one class on the test rows; precision is None if the class is never predicted."""

    name: str
    rows: int
    precision: float | None
    recall: float


def class_scores(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> list[ClassScores]:
    """Return the scores of the classes that test rows have, the lowest recall first."""
    found = []
    for place, (name, line, column) in enumerate(zip(classes, counts, zip(*counts, strict=True), strict=True)):
        right, rows, predicted = line[place], sum(line), sum(column)
        if rows:
            found.append(ClassScores(name, rows, right / predicted if predicted else None, right / rows))
    return sorted(found, key=lambda each: (each.recall, each.rows, each.name))


def class_frequencies(classes: Mapping[str, Mapping[str, int]]) -> list[tuple[str, float, str]]:
    """Return name, bar length (1 for the longest) and figures as text per class, most frequent first.

    Empty for a regression.
    """
    totals = sorted(((sum(rows.values()), label) for label, rows in classes.items()), key=lambda entry: -entry[0])
    most, rows = max((total for total, _ in totals), default=0) or 1, sum(total for total, _ in totals) or 1
    return [
        (
            fmt.shorten_label(label),
            total / most,
            f"{fmt.count(total)} ({fmt.percent(total / rows)})",
        )
        for total, label in totals
    ]


def describe_column(column: Mapping[str, Any]) -> str:
    """Describe a column: why it is unused, else its most frequent values, else its range."""
    if column.get("why"):
        return str(column["why"])
    if column.get("top"):
        top = ", ".join(
            f"{fmt.shorten_label(str(value))} ({fmt.count(rows)})" for value, rows in column["top"][:VALUES_SHOWN]
        )
        return f"{top}, …" if column.get("distinct", 0) > VALUES_SHOWN else top
    if "mean" in column:
        low, high, mean, std = (fmt.column_figure(column, name) for name in ("min", "max", "mean", "std"))
        return f"{low} to {high}, mean {mean} ± {std}"
    return ""


# Drawing takes longer than the rest of the page.
KIND, FILE = "charts", "charts.json"
MODULES = (
    "slipstream.pipeline.report.pages.charts",
    "slipstream.pipeline.report.pages.device_charts",
    "slipstream.pipeline.report.pages.network_charts",
    __name__,
)
#: Names of charts that are None for some runs.
OPTIONAL = (
    *("scatter", "roc", "precision_recall", "confusion", "reliability"),
    *("busy", "memory", "sm_active", "variants", "metric"),
)
#: Largest number of classes for a readable confusion matrix. Above it, the page lists mistakes.
MOST_CLASSES_DRAWN = 20


def stored_charts(results: StageResults, store: ArtifactStore | None) -> dict[str, Markup | None]:
    """Return every chart by name, or None if its data are missing from the results.

    Charts are cached in ``store`` if given.
    """
    if store is None:
        return as_markup(draw_charts(results))
    key = content_key(KIND, drawing_version(), {"artifacts": results.fingerprints})
    kept = store.find(KIND, key)
    if not isinstance(kept, Artifact):
        with store.workspace(KIND) as directory:
            writer = ArtifactWriter(directory)
            writer.write_json(FILE, draw_charts(results))
            writer.finish(KIND, {})
            kept = store.publish(directory, KIND, key)
    return as_markup(kept.read_json(FILE))


@cache
def drawing_version() -> str:
    return closure_version(MODULES, ("matplotlib",))


def as_markup(drawn: dict[str, str | None]) -> dict[str, Markup | None]:
    """Mark locally drawn SVG as HTML that needs no escaping."""
    return {name: None if svg is None else Markup(svg) for name, svg in drawn.items()}


def draw_charts(results: StageResults) -> dict[str, str | None]:
    from slipstream.pipeline.report.pages import charts, device_charts, network_charts

    history, evaluation, network = results.history, results.evaluation, results.network
    classes = evaluation.classes
    drawn: dict[str, str | None] = dict.fromkeys(OPTIONAL)
    if scatter := evaluation.scatter:
        drawn["scatter"] = charts.predicted_against_actual(scatter, results.signature.target)
    if roc := evaluation.roc:
        drawn["roc"] = charts.roc_curve(roc, classes[1])
    if curve := evaluation.precision_recall:
        drawn["precision_recall"] = charts.precision_recall_curve(curve)
    if (confusion := evaluation.confusion) and len(classes) <= MOST_CLASSES_DRAWN:
        drawn["confusion"] = charts.confusion_matrix(confusion, classes)
    if bins := evaluation.calibration:
        drawn["reliability"] = charts.reliability_diagram(bins)
    if devices := results.devices:
        drawn |= {"busy": device_charts.busy(devices), "memory": device_charts.memory(devices)}
        if any(device.sm_active for pod in devices.pods for device in pod.devices):
            drawn["sm_active"] = device_charts.sm_active(devices)
    if len([each for each in results.export.variants if each.file and each.timed]) >= FEWEST_POINTS:
        drawn["variants"] = charts.quality_against_latency(results.export)
    if len(history.evaluations) >= FEWEST_POINTS:
        drawn["metric"] = charts.validation_metric(history, evaluation.metric_of_rows)
    return drawn | {
        "loss": charts.loss(history),
        "learning_rate": charts.learning_rate(history),
        **(network_charts.network_charts(network.profile, network.course, network.model) if network else {}),
    }
