"""The head of the page: the verdict before anything else."""

from __future__ import annotations

from tasks.report import units
from tasks.report.markup import Markup, element
from tasks.report.summary import QualityFigures, RunSummary


def headline(summary: RunSummary) -> Markup:
    """The verdict before anything else: how good, what to deploy, how fast, where it was measured."""
    q = summary.quality
    name = units.NAMES.get(q.metric, q.metric)
    path = element("p", element("b", summary.data.source), " → ", element("b", summary.data.target), class_="path")
    return element(
        "section",
        path,
        element("h1", units.metric(q.metric, q.value), " ", element("small", f"test {name}")),
        element("p", *against_baseline(q, summary.data.rows_test), class_="verdict"),
        element("p", *deployed(summary), class_="verdict"),
        tiles(summary),
        class_="card hero",
    )


def against_baseline(q: QualityFigures, rows: int) -> list[object]:
    if q.baseline_value is None:
        return [f"On {units.rows(rows)} that it never saw."]
    reached = f" {q.baseline} ({units.metric(q.metric, q.baseline_value)}) on the same {units.rows(rows)}."
    if q.metric in units.SHARES:
        points = 100 * (q.value - q.baseline_value)
        how, better = f"{abs(points):.2f} points {'above' if points > 0 else 'below'}", points > 0
    else:
        change = 100 * (q.value / q.baseline_value - 1) if q.baseline_value else 0.0
        how, better = f"{abs(change):.1f} % {'above' if change > 0 else 'below'}", change < 0
    if q.value == q.baseline_value:
        return ["The same as", reached]
    return [element("span", how, class_="up" if better else "down"), reached]


def deployed(summary: RunSummary) -> list[object]:
    chosen = next(variant for variant in summary.variants if variant.chosen)
    latency = units.milliseconds(chosen.latency_p50_ms.get("1"))
    return ["Deploy ", element("b", chosen.name), f": {units.size(chosen.bytes)}, {latency} for one prediction."]


def tiles(summary: RunSummary) -> Markup:
    chosen = next(variant for variant in summary.variants if variant.chosen)
    d, n = summary.data, summary.network
    quarantined = f"{units.count(d.rows_quarantined)} quarantined" if d.rows_quarantined else "none quarantined"
    reused = sum(stage.reused for stage in summary.stages)
    shown = [
        ("Rows", units.count(d.rows_kept), f"of {units.count(d.rows_read)} kept, {quarantined}"),
        ("Model", units.size(chosen.bytes), f"{chosen.name}, {units.metric(summary.quality.metric, chosen.value)}"),
        (
            "All-reduce",
            units.bandwidth(n.all_reduce_busbw_gbps) if n.world > 1 else units.UNKNOWN,
            f"{units.microseconds(n.all_reduce_latency_us)} latency, {units.counted(n.world, 'process')}, {n.backend}",
        ),
        (
            "Time",
            units.seconds(sum(stage.seconds for stage in summary.stages if not stage.reused)),
            f"{len(summary.stages)} stages, {reused} reused" if reused else f"{len(summary.stages)} stages, all made",
        ),
    ]
    drawn = (
        element("div", element("dt", name), element("dd", value), element("dd", note), class_="tile")
        for name, value, note in shown
    )
    return element("dl", *drawn, class_="tiles")
