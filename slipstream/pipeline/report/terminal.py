"""Sections of a summary for a terminal of at least 80 columns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slipstream.pipeline.report.against_plan import AgainstPlan
from slipstream.pipeline.report.costs import CostFigures
from slipstream.pipeline.report.figures import DataFigures, NetworkFigures, Quarantined, ScheduleFigures
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.compression import Compression
from slipstream.shared.artifacts.results.devices import Bottleneck
from slipstream.shared.artifacts.results.evaluation import Evaluation
from slipstream.shared.artifacts.results.export import ExportReport, VariantFigures
from slipstream.shared.artifacts.results.ledger import TrainingFigures
from slipstream.shared.artifacts.results.scoring import Promotion
from slipstream.shared.artifacts.results.sweep import Sweep
from slipstream.shared.comparison.baseline import against_baseline, baseline_wins, references, unbalanced_figures
from slipstream.shared.stages import StageRun

WIDTH = 80
INDENT = 12
#: Words before the actual figures of a planned training: hours, dollars, interruptions.
VERBS = ("took", "paid", "interruptions")
BAR = 40
#: Maximum number of reasons and warnings shown; the card lists all.
LISTED = 8
#: The diagnosis is shown below this share of useful computing, if its advice pays.
USEFUL = 0.6
#: Maximum characters of a variant's and a model's name in tables; the text below and the report have the full name.
LONGEST_NAME, LONGEST_MODEL = 21, 19
#: Age in seconds from which a profile's age is shown.
STALE_S = 1800


def framed_text(title: str, sections: Iterable[Iterable[str]]) -> str:
    rule = "─" * WIDTH
    body = "\n\n".join(filter(None, ("\n".join(section) for section in sections)))
    return f"\n{rule}\nSlipstream  {title}\n{rule}\n{body}\n{rule}"


def labelled_lines(label: str, text: str, width: int = WIDTH) -> Iterator[str]:
    """Yield ``text`` wrapped in a column, with the label before its first line."""
    lines = textwrap.wrap(text, width - INDENT, break_long_words=False, break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<{INDENT}}{line}"


def data_lines(d: DataFigures) -> Iterator[str]:
    aside = fmt.count(d.rows_quarantined) if d.rows_quarantined else "none"
    yield from labelled_lines(
        "Data", f"{fmt.count_with_noun(d.rows_read, d.unit)} read, {fmt.count(d.rows_kept)} kept, {aside} quarantined"
    )
    yield from labelled_lines(
        "",
        f"{fmt.count(d.rows_train)} to train, {fmt.count(d.rows_validation)} to validate, "
        f"{fmt.count(d.rows_test)} to test" + (f"; {fmt.count(d.tokens)} tokens to train" if d.tokens else ""),
    )
    for sentence in filter(None, (d.answers, *d.drawn)):
        yield from labelled_lines("", sentence)


def quarantine_lines(reasons: Sequence[Quarantined]) -> Iterator[str]:
    for index, q in enumerate(reasons[:LISTED]):
        where = f" in column {q.column!r}" if q.column else ""
        words = f"{fmt.rows(q.rows)}: {q.reason}{where} (first in {q.file}, line {fmt.count(q.line)})"
        yield from labelled_lines("" if index else "Quarantined", words)
    yield from further_lines(len(reasons), "reasons")


def warning_lines(words: Sequence[str]) -> Iterator[str]:
    for index, warning in enumerate(words[:LISTED]):
        yield from labelled_lines("" if index else "Warnings", warning)
    yield from further_lines(len(words), "warnings")


def further_lines(number: int, noun: str) -> Iterator[str]:
    if number > LISTED:
        yield from labelled_lines("", f"and {fmt.count(number - LISTED)} more {noun}: see the card")


def quality_lines(evaluation: Evaluation) -> Iterator[str]:
    metric, baseline = evaluation.metric.name, evaluation.baseline
    value = baseline.of(metric)
    against = against_baseline(evaluation)
    beside = f" ({baseline.name}: {fmt.metric(metric, value)}; {against.sentence})" if against else ""
    yield from labelled_lines(
        "Quality", f"test {fmt.NAMES.get(metric, metric)} {fmt.metric(metric, evaluation.metric.value)}{beside}"
    )
    if better := baseline_wins(evaluation):
        yield from labelled_lines("", f"{better}; it is neither exported nor promoted.")
    if more := unbalanced_figures(evaluation) or references(evaluation):
        yield from labelled_lines("", more)


def sweep_lines(sweep: Sweep | None) -> Iterator[str]:
    if sweep is None:
        return
    best, others = sweep.best_trial, ", ".join(f"{fmt.count(n)} {state}" for state, n in sweep.counts.items())
    yield from labelled_lines("Sweep", f"{fmt.count_with_noun(len(sweep.trials), 'trial')}: {others}")
    yield from labelled_lines("", f"trial {best.number} is the best: {best.settings}")
    yield from labelled_lines("", f"{fmt.capitalise_sentence(sweep.worth)}.")


def training_lines(training: TrainingFigures | None, bottleneck: Bottleneck | None) -> Iterator[str]:
    """Yield an early end or too few steps, and a diagnosis if enough seconds could be saved."""
    ended = training.ended if training else ""
    if ended:
        yield from labelled_lines("Training", ended)
    if bottleneck and bottleneck.verdict and bottleneck.useful < USEFUL and bottleneck.pays:
        used = f"{100 * bottleneck.useful:.0f} % of {fmt.seconds(bottleneck.seconds)} was useful computing"
        yield from labelled_lines(
            "" if ended else "Training", f"{used}. {fmt.capitalise_sentence(bottleneck.sentence)}"
        )


def trained_by(training: TrainingFigures | None) -> Iterator[str]:
    """Yield the code versions that trained the model, if there were several."""
    if training and len(training.code_versions) > 1:
        yield from labelled_lines("Code", f"trained by {', then '.join(training.code_versions)}")


def variant_lines(export: ExportReport, metric: str) -> Iterator[str]:
    """Yield a table of the measured variants and the reason for the choice, then files for other libraries.

    Without variants, yields the files and the reason why there are none.
    """
    if export.variants:
        yield from timing_lines(export, metric)
        yield from library_lines(export, "")
    else:
        yield from library_lines(export, "Model")
        yield from labelled_lines("", f"No ONNX variants: {export.why}.")


def library_lines(export: ExportReport, label: str) -> Iterator[str]:
    for number, each in enumerate(export.libraries):
        files = f"{fmt.count_with_noun(each.parts, 'file')} of weights, {fmt.file_size(each.bytes)}"
        readers = " and ".join(each.loaded_by)
        yield from labelled_lines("" if number else label, f"{each.name}/: {files}, for {readers}")


def timing_lines(export: ExportReport, metric: str) -> Iterator[str]:
    measured, batches = export.timed, export.batches
    sizes = [f"batch {batch}" if batch == batches[0] else batch for batch in batches]
    heads = ["variant", "size", *sizes, fmt.NAMES.get(metric, metric)]
    rows: dict[str, list[str]] = {}
    for variant in measured:
        name, *more = textwrap.wrap(variant.name, LONGEST_NAME, break_long_words=False, break_on_hyphens=False)
        rows[variant.name] = [shortened(name, LONGEST_NAME), *cells(variant, batches, metric)]
        rows |= {f"{variant.name}/{line}": [line, *[""] * (len(heads) - 1)] for line in more}
    yield from table_lines("Model", heads, rows, export.chosen)
    if others := len(export.variants) - len(measured):
        verb = "was" if others == 1 else "were"
        yield from labelled_lines(
            "", f"{fmt.count_with_noun(others, 'other')} {verb} ruled out earlier: see the report."
        )
    yield from labelled_lines("", f"{fmt.capitalise_sentence(export.why)}.")
    threads = fmt.count_with_noun(export.machine.threads, "thread")
    yield from labelled_lines("", f"Median latency on {export.machine.device}, {threads}.")


def compression_lines(compression: Compression | None) -> Iterator[str]:
    """Yield a table of the tested networks, then the reason for the choice."""
    if compression is None:
        return
    unit = "%" if compression.metric == "rmse" else "points"
    rows = {"": ["as trained", fmt.count(compression.size.parameters), "", "", ""]}
    for one in compression.tried:
        speed = f"{compression.speeds[one.name].value:.2f}"
        lost = f"{one.loss:.2f}, ≤ {fmt.limit(one.high)}"
        name = shortened(one.name, LONGEST_MODEL)
        rows[one.name] = [name, fmt.count(one.size.parameters), lost, speed, one.answer]
    yield from table_lines("Tried", ["model", "parameters", f"lost, {unit}", "speed", ""], rows, compression.taken)
    yield from labelled_lines("", "The losses in the table are those of the validation rows.")
    yield from labelled_lines("", f"{fmt.capitalise_sentence(compression.why)}.")


def table_lines(label: str, heads: list[str], rows: Mapping[str, list[str]], chosen: str) -> Iterator[str]:
    """Yield aligned columns below ``heads``, with the row ``chosen`` marked.

    The first column is left-aligned, the others are right-aligned.
    """
    lines = fmt.aligned_table(heads, rows.values(), left=heads[:1]).split("\n")
    for name, line in zip((None, *rows), lines, strict=True):
        yield f"{label if name is None else '':<{INDENT - 2}}{'▸ ' if name == chosen else '  '}{line}".rstrip()


def cells(variant: VariantFigures, batches: list[str], metric: str) -> list[str]:
    latencies = [fmt.milliseconds(variant.milliseconds(batch, "p50")) for batch in batches]
    scored = fmt.metric(metric, variant.metrics.of(metric) if variant.metrics else None)
    return [fmt.file_size(variant.bytes), *latencies, scored]


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def network_lines(n: NetworkFigures | None) -> Iterator[str]:
    if n is None:
        yield from labelled_lines("Network", "not measured: the benchmark of the collectives failed")
        return
    where = fmt.count_with_noun(n.world, "process") + (f" on {n.nodes} nodes" if n.nodes > 1 else "")
    if n.all_reduce_latency_us is None or n.all_reduce_latency_bytes is None or n.all_reduce_busbw_bytes is None:
        yield from labelled_lines("Network", f"{where}, {n.backend}, {n.device}; all-reduce was not measured")
        return
    latency = f"{fmt.microseconds(n.all_reduce_latency_us)} at {fmt.size_text(n.all_reduce_latency_bytes)}"
    busbw = f"{fmt.bandwidth(n.all_reduce_busbw_gbps)} at {fmt.size_text(n.all_reduce_busbw_bytes)}"
    if n.world == 1:
        busbw = "no bandwidth, because one process has no link"
    short = "; a short benchmark" if n.short else ""
    yield from labelled_lines("Network", f"all-reduce {latency}, {busbw} ({where}, {n.backend}, {n.device}{short})")
    if (passed := time.time() - n.measured_at) > STALE_S:
        yield from labelled_lines("", f"measured {fmt.age(passed)} ago on the same hardware")
    for finding in n.findings:
        yield from labelled_lines("", finding)


def time_lines(stages: Sequence[StageRun]) -> Iterator[str]:
    longest = max((stage.seconds for stage in stages if not stage.reused), default=0.0)
    name_width = max((len(stage.name) for stage in stages), default=0)
    for index, stage in enumerate(stages):
        label = "Time" if index == 0 else ""
        yield f"{label:<{INDENT}}{stage.name:<{name_width}}  {took(stage):>12}  {bar(stage, longest)}".rstrip()


def cost_lines(costs: Sequence[CostFigures]) -> Iterator[str]:
    if not costs:
        return
    total = costs[-1]
    said = [f"{fmt.significant(total.gpu_hours)} GPU-hours"] if total.gpu_hours else []
    if total.watt_hours is not None:
        said.append(fmt.energy(total.watt_hours))
    if total.paid is not None:
        lost = f", {fmt.dollars(total.lost)} of it for lost work" if total.lost else ""
        on_demand = f" ({fmt.dollars(total.on_demand)} on demand)" if total.on_demand is not None else ""
        said.insert(0, f"{fmt.dollars(total.paid)}{on_demand}{lost}")
    elif total.on_demand is not None:
        said.insert(0, f"{fmt.dollars(total.on_demand)} on demand; the spot price is unknown")
    if total.unpriced_pod_hours and total.paid is not None:
        said.append(f"{fmt.significant(total.unpriced_pod_hours)} pod-hours without a known price")
    yield from labelled_lines("Cost", "; ".join(said))


def plan_lines(found: AgainstPlan | None) -> Iterator[str]:
    if found is None:
        return
    for label, verb, (_, of, actual, answer) in zip(("Plan", "", ""), VERBS, found.lines(), strict=True):
        yield from labelled_lines(label, f"{verb} {actual}: {answer or 'planned'}, {of}")
    if found.caveat:
        yield from labelled_lines("", found.caveat)


def took(stage: StageRun) -> str:
    return "reused" if stage.reused else fmt.seconds(stage.seconds)


def bar(stage: StageRun, longest: float) -> str:
    return "" if stage.reused or not longest else "━" * max(1, round(BAR * stage.seconds / longest))


def schedule_lines(schedule: ScheduleFigures | None) -> Iterator[str]:
    """Yield the times of a scheduled run, and the runs that were skipped meanwhile."""
    if schedule:
        yield from labelled_lines("Scheduled", f"for {schedule.kickoff}, ended {schedule.ended} (UTC)")
        yield from labelled_lines(
            "Skipped", ", ".join(schedule.skipped) or "none: no other run was due before this one ended"
        )


def promotion_lines(promotion: Promotion | None) -> Iterator[str]:
    if promotion:
        done = f"version {promotion.version} is in service" if promotion.promoted else "no: the promoted model stays"
        yield from labelled_lines("Promoted", done)
        yield from labelled_lines("", promotion.why)
        yield f"{'Registry':<{INDENT}}{promotion.registry}"


def file_lines(files: Mapping[str, str], directory: str) -> Iterator[str]:
    """Yield a line per file, never wrapped so that paths can be copied.

    ``files`` are relative to ``directory``, or URIs.
    """
    for label, file in files.items():
        yield f"{label:<{INDENT}}{file if '://' in file else f'{directory}/{file}'}"
