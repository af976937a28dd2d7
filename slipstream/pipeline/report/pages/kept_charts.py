"""Cache of a report's charts, keyed by content.

Drawing takes longer than the rest of the page.
"""

from __future__ import annotations

from functools import cache

from markupsafe import Markup

from slipstream.pipeline.report.stage_results import StageResults
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.store import ArtifactStore, content_key
from slipstream.shared.artifacts.versions import closure_version

KIND, FILE = "charts", "charts.json"
MODULES = (
    "slipstream.pipeline.report.pages.charts",
    "slipstream.pipeline.report.pages.device_charts",
    "slipstream.pipeline.report.pages.network_charts",
    __name__,
)
#: Names of charts that are None for some runs.
OPTIONAL = ("scatter", "roc", "confusion", "reliability", "busy", "memory", "sm_active", "variants")
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
    if (confusion := evaluation.confusion) and len(classes) <= MOST_CLASSES_DRAWN:
        drawn["confusion"] = charts.confusion_matrix(confusion, classes)
    if bins := evaluation.calibration:
        drawn["reliability"] = charts.reliability_diagram(bins)
    if devices := results.devices:
        drawn |= {"busy": device_charts.busy(devices), "memory": device_charts.memory(devices)}
        if any(device.sm_active for pod in devices.pods for device in pod.devices):
            drawn["sm_active"] = device_charts.sm_active(devices)
    if results.export.variants:
        drawn["variants"] = charts.quality_against_latency(results.export)
    return drawn | {
        "loss": charts.loss(history),
        "metric": charts.validation_metric(history, evaluation.metric_of_rows),
        **(network_charts.network_charts(network.profile, network.course, network.model) if network else {}),
    }
