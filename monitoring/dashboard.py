"""Grafana dashboard of the metrics of Slipstream's pods.

``python monitoring/dashboard.py`` writes ``dashboard.json``. It needs the extra ``monitoring``
(grafana-foundation-sdk). Panels query only metrics of ``slipstream/shared/telemetry/metrics.py``, of the chosen
executions and tasks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh, VariableSort

from slipstream.shared.telemetry import metrics
from slipstream.shared.telemetry.metrics import Metric

FILE = Path(__file__).with_name("dashboard.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
#: Panels of a row, and Grafana's columns.
PER_ROW, COLUMNS, HEIGHT = 3, 24, 8
#: Legends of the series of a GPU, a rank and a pod.
GPU, RANK, POD = "{{node}} {{gpu_uuid}}", "rank {{rank}}", "{{task}} {{node}}"

WITH_NAME = f"on ({', '.join(metrics.GPU)}) group_left (index, name)"


@dataclass(frozen=True)
class Panel:
    """Panel with expressions by their legend, in a unit of Grafana."""

    title: str
    unit: str
    queries: dict[str, str]
    about: str = ""
    #: Maximum of the axis, if the figures have one.
    maximum: float | None = None
    stacked: bool = False


def of(metric: Metric, suffix: str = "", *conditions: str) -> str:
    """Return a selector of the metric's series of the chosen executions and tasks."""
    chosen = ['execution=~"$execution"', 'task=~"$task"', *conditions]
    return f"{metric.name}{suffix}{{{', '.join(chosen)}}}"


def rate(metric: Metric, suffix: str = "", *conditions: str) -> str:
    """Return the metric's growth per second."""
    return f"rate({of(metric, suffix, *conditions)}[$__rate_interval])"


def quantile(share: float) -> str:
    """Return a quantile of every rank's step times."""
    return f"histogram_quantile({share}, {rate(metrics.STEP, '_bucket')})"


PANELS: dict[str, list[Panel]] = {
    "Training": [
        Panel("Samples", "short", {RANK: rate(metrics.SAMPLES)}, "Per second."),
        Panel("Time of a step", "s", {f"median, {RANK}": quantile(0.5), f"95 %, {RANK}": quantile(0.95)}),
        Panel(
            "Parts of the time",
            "percentunit",
            {"{{phase}}": f"avg by (phase) ({rate(metrics.PHASE)})"},
            "Mean over ranks: waiting for data, computing, exchanging, the optimiser, evaluations, checkpoints.",
            stacked=True,
        ),
        Panel("Useful time", "percentunit", {"{{execution}}": of(metrics.GOODPUT)}, maximum=1),
        Panel(
            "What holds it back",
            "percentunit",
            {"{{cause}}": of(metrics.BOTTLENECK)},
            "Fraction of the time that a fix of each cause would save. From 20 % on, the largest is the diagnosis.",
        ),
        Panel("Since the last step", "s", {RANK: f"time() - ({of(metrics.LAST_STEP)} > 0)"}),
        Panel("Steps", "short", {RANK: rate(metrics.STEPS)}, "Per second."),
        Panel(
            "Cost",
            "currencyUSD",
            {"{{price}}": f"sum by (price) ({of(metrics.COST)})"},
            "Cost of the current pods since their start: paid, and for the same hours on demand.",
        ),
    ],
    "GPUs": [
        Panel(
            "Busy",
            "percentunit",
            {GPU: of(metrics.GPU_BUSY)},
            "NVML's utilisation: the fraction of time in which any kernel ran, even if it only waited for other ranks.",
            maximum=1,
        ),
        Panel(
            "Multiprocessors with work", "percentunit", {GPU: of(metrics.GPU_SM_ACTIVE)}, "From Hopper on.", maximum=1
        ),
        Panel(
            "Memory",
            "percentunit",
            {GPU: f"{of(metrics.GPU_MEMORY_USED)} / {of(metrics.GPU_MEMORY_LIMIT)}"},
            maximum=1,
        ),
        Panel("Power", "watt", {GPU: of(metrics.GPU_POWER)}),
        Panel(
            "Energy",
            "joule",
            {"{{execution}}": f"sum by (execution) ({of(metrics.GPU_ENERGY)})"},
            "Since pods started.",
        ),
        Panel("Held", "short", {"{{execution}}": f"sum by (execution) ({rate(metrics.GPU_SECONDS)})"}, "GPUs in use."),
        Panel(
            "Clocked down", "percentunit", {f"{GPU} {{{{reason}}}}": rate(metrics.GPU_THROTTLED)}, "Share of the time."
        ),
        Panel("Temperature", "celsius", {GPU: of(metrics.GPU_TEMPERATURE)}),
        Panel("Clock", "hertz", {GPU: of(metrics.GPU_SM_CLOCK)}),
        Panel("PCIe and NVLink", "Bps", {f"{GPU} {{{{link}}}} {{{{direction}}}}": rate(metrics.GPU_IO)}),
        Panel(
            "Answers of the driver",
            "short",
            {"{{node}} {{index}} {{name}}": f"{of(metrics.GPU_UP)} * {WITH_NAME} {of(metrics.GPU_INFO)}"},
            "0: the driver is hung, or has lost the GPU.",
            maximum=1,
        ),
    ],
    "Pods": [
        Panel("Waiting for a processor", "s", {POD: rate(metrics.CPU_WAIT)}, "Seconds a second, over all processes."),
        Panel("Stopped by the CPU quota", "percentunit", {POD: rate(metrics.CPU_THROTTLED)}),
        Panel("Memory", "percentunit", {POD: f"{of(metrics.MEMORY_USED)} / {of(metrics.MEMORY_LIMIT)}"}, maximum=1),
    ],
}


def panel_of(panel: Panel, number: int) -> timeseries.Panel:
    """Return the panel, built with the SDK."""
    built = (
        timeseries.Panel()
        .id(number)
        .title(panel.title)
        .description(panel.about)
        .datasource(SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(COLUMNS // PER_ROW)
        .height(HEIGHT)
        .fill_opacity(50 if panel.stacked else 5)
        .legend(common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM))
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    if panel.stacked:
        built = built.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    for letter, (legend, expression) in zip("ABCDEF", panel.queries.items(), strict=False):
        # Grafana needs different names of the queries, and the SDK gives none.
        built = built.with_target(
            prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(expression).legend_format(legend).range()
        )
    return built


def choice(label: str, condition: str) -> dashboard.QueryVariable:
    """Return a variable for the viewer's choice of a label's values; all are chosen at first."""
    query = f"label_values({metrics.CPU_WAIT.name}{condition}, {label})"
    return (
        dashboard.QueryVariable(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_DESC)
        .multi(True)
        .include_all(True)
    )


def render() -> str:
    """Return the dashboard as JSON."""
    built = (
        dashboard.Dashboard("Slipstream")
        .uid("slipstream")
        .tags(["slipstream"])
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").type("prometheus"))
        .with_variable(choice("execution", ""))
        .with_variable(choice("task", '{execution=~"$execution"}'))
    )
    number = count(1)
    for title, panels in PANELS.items():
        built = built.with_row(dashboard.Row(title).id(next(number)))
        for panel in panels:
            built = built.with_panel(panel_of(panel, next(number)))
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
