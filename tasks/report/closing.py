"""The block that closes a run, for a terminal of at least 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasks.report import units

if TYPE_CHECKING:
    from tasks.report.summary import RunSummary, StageFigures, VariantFigures

WIDTH = 80
INDENT = 12
BAR = 40


def block(summary: RunSummary) -> str:
    """The whole block, without a line break at its end."""
    sections = (data(summary), quality(summary), variants(summary), network(summary), time(summary), places(summary))
    rule = "─" * WIDTH
    body = "\n\n".join("\n".join(section) for section in sections)
    return f"\n{rule}\n{title(summary)}\n{rule}\n{body}\n{rule}"


def labelled(label: str, text: str, width: int = WIDTH) -> Iterator[str]:
    """``text`` in a column, with the label before its first line."""
    lines = textwrap.wrap(text, width - INDENT, break_long_words=False, break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<{INDENT}}{line}"


def title(summary: RunSummary) -> str:
    return f"Slipstream  {summary.data.source} → {summary.data.target}"


def data(summary: RunSummary) -> Iterator[str]:
    d = summary.data
    quarantined = units.count(d.rows_quarantined) if d.rows_quarantined else "none"
    yield from labelled(
        "Data", f"{units.rows(d.rows_read)} read, {units.count(d.rows_kept)} kept, {quarantined} quarantined"
    )
    yield from labelled(
        "",
        f"{units.count(d.rows_train)} to train, {units.count(d.rows_validation)} to validate, "
        f"{units.count(d.rows_test)} to test",
    )


def quality(summary: RunSummary) -> Iterator[str]:
    q = summary.quality
    name = units.NAMES.get(q.metric, q.metric)
    baseline = f" ({q.baseline}: {units.metric(q.metric, q.baseline_value)})" if q.baseline_value is not None else ""
    yield from labelled("Quality", f"test {name} {units.metric(q.metric, q.value)}{baseline}")


def variants(summary: RunSummary) -> Iterator[str]:
    """A table of the variants, the chosen one marked, and below it why it was chosen."""
    metric = summary.quality.metric
    batches = list(dict.fromkeys(batch for variant in summary.variants for batch in variant.latency_p50_ms))
    heads = ["variant", "size", *(f"batch {batch}" for batch in batches), units.NAMES.get(metric, metric)]
    lines = [heads, *(row(variant, batches, metric) for variant in summary.variants)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for index, line in enumerate(lines):
        mark = "▸ " if index and summary.variants[index - 1].chosen else "  "
        cells = [f"{line[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))]
        label = "Model" if index == 0 else ""
        yield f"{label:<{INDENT - 2}}{mark}{'   '.join(cells)}".rstrip()
    yield from labelled("", summary.why)
    yield from labelled("", f"Median latency on {summary.machine}, {units.counted(summary.threads, 'thread')}.")


def row(variant: VariantFigures, batches: list[str], metric: str) -> list[str]:
    latencies = [units.milliseconds(variant.latency_p50_ms.get(batch)) for batch in batches]
    return [variant.name, units.size(variant.bytes), *latencies, units.metric(metric, variant.value)]


def network(summary: RunSummary) -> Iterator[str]:
    n = summary.network
    where = units.counted(n.world, "process") + (f" on {n.nodes} nodes" if n.nodes > 1 else "")
    if n.all_reduce_latency_us is None or n.all_reduce_latency_bytes is None or n.all_reduce_busbw_bytes is None:
        yield from labelled("Network", f"{where}, {n.backend}, {n.device}; all-reduce was not measured")
        return
    latency = f"{units.microseconds(n.all_reduce_latency_us)} at {units.message_size(n.all_reduce_latency_bytes)}"
    busbw = f"{units.bandwidth(n.all_reduce_busbw_gbps)} at {units.message_size(n.all_reduce_busbw_bytes)}"
    if n.world == 1:
        busbw = "no bandwidth, as one process has no link"
    yield from labelled("Network", f"all-reduce {latency}, {busbw} ({where}, {n.backend}, {n.device})")


def time(summary: RunSummary) -> Iterator[str]:
    """A line and a bar per stage."""
    longest = max((stage.seconds for stage in summary.stages if not stage.reused), default=0.0)
    name_width = max((len(stage.name) for stage in summary.stages), default=0)
    for index, stage in enumerate(summary.stages):
        label = "Time" if index == 0 else ""
        yield f"{label:<{INDENT}}{stage.name:<{name_width}}  {took(stage):>12}  {bar(stage, longest)}".rstrip()


def took(stage: StageFigures) -> str:
    return "reused" if stage.reused else units.seconds(stage.seconds)


def bar(stage: StageFigures, longest: float) -> str:
    return "" if stage.reused or not longest else "━" * max(1, round(BAR * stage.seconds / longest))


def places(summary: RunSummary) -> Iterator[str]:
    """Never wrapped: a path that is torn cannot be copied."""
    yield f"{'Report':<{INDENT}}{summary.directory}/{summary.report}"
    yield f"{'Model':<{INDENT}}{summary.directory}/{summary.model_file}"
