"""The text that a run prints at its end, for a terminal of at least 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slipstream.artifacts.results.compression import Compression
from slipstream.artifacts.results.promotion import Promotion
from slipstream.report import formatting as fmt
from slipstream.report.figures import (
    DataFigures,
    DataRunFigures,
    ExportFigures,
    RunFigures,
    ScheduleFigures,
    StageFigures,
    VariantFigures,
)

WIDTH = 80
NONE_SKIPPED = "none: no other run was due before this one ended"
INDENT = 12
BAR = 40
#: Reasons and warnings; the card has them all.
LISTED = 8
#: Of a variant or network in its table; the reason below and the report have the whole name.
LONGEST_NAME, LONGEST_NETWORK = 21, 19


def of_run(summary: RunFigures) -> str:
    """What a whole run prints, without a line break at its end."""
    sections = (
        data(summary.data),
        tried(summary.compression),
        quality(summary),
        variants(summary, summary.quality.metric),
        network(summary),
        time(summary.stages),
        schedule(summary.schedule),
        promotion(summary.promotion),
        places({"Report": summary.report, "Model": summary.model_file}, summary.directory),
    )
    return framed(f"{summary.data.source} → {summary.data.target}", sections)


def of_export(summary: ExportFigures) -> str:
    """What a run that only exports prints."""
    sections = (
        variants(summary, summary.metric),
        time(summary.stages),
        places({"Report": summary.report, "Model": summary.model_file}, summary.directory),
    )
    return framed(f"export → {summary.target}", sections)


def of_compression(compression: Compression) -> str:
    """What a run prints that was to make a trained network smaller."""
    title = f"{compression.method} → {compression.taken or 'the trained network stays'}"
    return framed(title, [[*tried(compression), f"{'Model':<{INDENT}}{compression.model}"]])


def of_data(summary: DataRunFigures) -> str:
    """What a run that only prepares prints."""
    sections = (
        data(summary.data),
        quarantined(summary),
        columns(summary),
        warnings(summary),
        time(summary.stages),
        places({"Card": summary.card, "Prepared": summary.prepared}, summary.directory),
    )
    return framed(f"{summary.data.source} → {summary.data.target}", sections)


def framed(title: str, sections: Iterable[Iterable[str]]) -> str:
    """The sections that have something to say, under a title."""
    rule = "─" * WIDTH
    body = "\n\n".join(filter(None, ("\n".join(section) for section in sections)))
    return f"\n{rule}\nSlipstream  {title}\n{rule}\n{body}\n{rule}"


def labelled(label: str, text: str, width: int = WIDTH) -> Iterator[str]:
    """``text`` in a column, with the label before its first line."""
    lines = textwrap.wrap(text, width - INDENT, break_long_words=False, break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<{INDENT}}{line}"


def data(d: DataFigures) -> Iterator[str]:
    aside = fmt.count(d.rows_quarantined) if d.rows_quarantined else "none"
    yield from labelled("Data", f"{fmt.rows(d.rows_read)} read, {fmt.count(d.rows_kept)} kept, {aside} quarantined")
    yield from labelled(
        "",
        f"{fmt.count(d.rows_train)} to train, {fmt.count(d.rows_validation)} to validate, "
        f"{fmt.count(d.rows_test)} to test",
    )


def quarantined(summary: DataRunFigures) -> Iterator[str]:
    """A line per reason, the most frequent first."""
    for index, q in enumerate(summary.quarantined[:LISTED]):
        where = f" in column {q.column!r}" if q.column else ""
        words = f"{fmt.rows(q.rows)}: {q.reason}{where} (first in {q.file}, line {fmt.count(q.line)})"
        yield from labelled("" if index else "Quarantined", words)
    yield from further(len(summary.quarantined), "reasons")


def columns(summary: DataRunFigures) -> Iterator[str]:
    yield from labelled("Columns", ", ".join(f"{fmt.count(n)} {role}" for role, n in summary.roles.items()))


def warnings(summary: DataRunFigures) -> Iterator[str]:
    for index, warning in enumerate(summary.warnings[:LISTED]):
        yield from labelled("" if index else "Warnings", warning)
    yield from further(len(summary.warnings), "warnings")


def further(number: int, noun: str) -> Iterator[str]:
    if number > LISTED:
        yield from labelled("", f"and {fmt.count(number - LISTED)} more {noun}: see the card")


def quality(summary: RunFigures) -> Iterator[str]:
    q = summary.quality
    name = fmt.NAMES.get(q.metric, q.metric)
    baseline = f" ({q.baseline}: {fmt.metric(q.metric, q.baseline_value)})" if q.baseline_value is not None else ""
    yield from labelled("Quality", f"test {name} {fmt.metric(q.metric, q.value)}{baseline}")


def variants(summary: RunFigures | ExportFigures, metric: str) -> Iterator[str]:
    """A table of the variants that were measured, the recommended one marked, and below it why it is recommended."""
    measured = [variant for variant in summary.variants if variant.timed]
    batches = sorted({batch for variant in measured for batch in variant.latency_p50_ms}, key=int)
    sizes = [f"batch {batch}" if batch == batches[0] else batch for batch in batches]
    heads = ["variant", "size", *sizes, fmt.NAMES.get(metric, metric)]
    lines = [heads, *(row(variant, batches, metric) for variant in measured)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for index, line in enumerate(lines):
        mark = "▸ " if index and measured[index - 1].chosen else "  "
        cells = [f"{line[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))]
        label = "Model" if index == 0 else ""
        yield f"{label:<{INDENT - 2}}{mark}{'  '.join(cells)}".rstrip()
    if others := len(summary.variants) - len(measured):
        verb = "was" if others == 1 else "were"
        yield from labelled("", f"{fmt.counted(others, 'other')} {verb} left out before: see the report.")
    yield from labelled("", f"{fmt.sentence(summary.why)}.")
    yield from labelled("", f"{summary.ceiling}.")
    yield from labelled("", f"Median latency on {summary.machine}, {fmt.counted(summary.threads, 'thread')}.")


def tried(compression: Compression | None) -> Iterator[str]:
    """A table of the networks that were tried, and below it what was taken and why."""
    if compression is None:
        return
    unit = "%" if compression.metric == "rmse" else "points"
    lines = [["network", "parameters", f"lost, {unit}", "speed", ""]]
    lines.append(["as trained", fmt.count(compression.size.parameters), "", "", ""])
    for one in compression.tried:
        speed = f"{compression.speeds[one.name].value:.2f}"
        lost = f"{one.loss:.2f}, ≤ {one.high:.2f}"
        lines.append([shortened(one.name, LONGEST_NETWORK), fmt.count(one.size.parameters), lost, speed, one.answer])
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    for index, line in enumerate(lines):
        mark = "▸ " if index and line[0] == shortened(compression.taken or "as trained", LONGEST_NETWORK) else "  "
        cells = [f"{line[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))]
        yield f"{'' if index else 'Tried':<{INDENT - 2}}{mark}{'  '.join(cells)}".rstrip()
    yield from labelled("", f"{fmt.sentence(compression.why)}.")


def row(variant: VariantFigures, batches: list[str], metric: str) -> list[str]:
    latencies = [fmt.milliseconds(variant.latency_p50_ms.get(batch)) for batch in batches]
    return [
        shortened(variant.name, LONGEST_NAME),
        fmt.size(variant.bytes),
        *latencies,
        fmt.metric(metric, variant.value),
    ]


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def network(summary: RunFigures) -> Iterator[str]:
    n = summary.network
    if n is None:
        yield from labelled("Network", "not measured: the benchmark of the collectives failed")
        return
    where = fmt.counted(n.world, "process") + (f" on {n.nodes} nodes" if n.nodes > 1 else "")
    if n.all_reduce_latency_us is None or n.all_reduce_latency_bytes is None or n.all_reduce_busbw_bytes is None:
        yield from labelled("Network", f"{where}, {n.backend}, {n.device}; all-reduce was not measured")
        return
    latency = f"{fmt.microseconds(n.all_reduce_latency_us)} at {fmt.message_size(n.all_reduce_latency_bytes)}"
    busbw = f"{fmt.bandwidth(n.all_reduce_busbw_gbps)} at {fmt.message_size(n.all_reduce_busbw_bytes)}"
    if n.world == 1:
        busbw = "no bandwidth, as one process has no link"
    yield from labelled("Network", f"all-reduce {latency}, {busbw} ({where}, {n.backend}, {n.device})")
    age = fmt.age(n.measured_at)
    if age:
        yield from labelled("", f"measured {age} ago on the same hardware")
    for finding in n.findings:
        yield from labelled("", finding)


def time(stages: Sequence[StageFigures]) -> Iterator[str]:
    """A line and a bar per stage."""
    longest = max((stage.seconds for stage in stages if not stage.reused), default=0.0)
    name_width = max((len(stage.name) for stage in stages), default=0)
    for index, stage in enumerate(stages):
        label = "Time" if index == 0 else ""
        yield f"{label:<{INDENT}}{stage.name:<{name_width}}  {took(stage):>12}  {bar(stage, longest)}".rstrip()


def took(stage: StageFigures) -> str:
    return "reused" if stage.reused else fmt.seconds(stage.seconds)


def bar(stage: StageFigures, longest: float) -> str:
    return "" if stage.reused or not longest else "━" * max(1, round(BAR * stage.seconds / longest))


def schedule(schedule: ScheduleFigures | None) -> Iterator[str]:
    """Of a run that a schedule started, the runs that were skipped while it went on."""
    if schedule:
        yield from labelled("Scheduled", f"for {schedule.kickoff}, ended {schedule.ended} (UTC)")
        yield from labelled(
            "Skipped", ", ".join(schedule.skipped) or "none: no other run was due before this one ended"
        )


def promotion(promotion: Promotion | None) -> Iterator[str]:
    """Of a run whose model was to go into service, what became of that, and why."""
    if promotion:
        done = f"version {promotion.version} is in service" if promotion.promoted else "no: the promoted model stays"
        yield from labelled("Promoted", done)
        yield from labelled("", promotion.why)
        yield f"{'Registry':<{INDENT}}{promotion.registry}"


def places(files: Mapping[str, str], directory: str) -> Iterator[str]:
    """Never wrapped: a path that is torn cannot be copied. ``files`` are in ``directory``, or are URIs."""
    for label, file in files.items():
        yield f"{label:<{INDENT}}{file if '://' in file else f'{directory}/{file}'}"
