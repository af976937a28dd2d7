"""The sections of the page that say how the model came to be and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.report import charts, units
from tasks.report.markup import Markup, element, join
from tasks.report.parts import bars, card, cells, first_capital, heads, section
from tasks.report.results import Results
from tasks.report.summary import QualityFigures, RunSummary, VariantFigures

WORST_SHOWN = 12
#: In which metrics are listed.
ORDER = list(units.NAMES)


def goodput(ledger: dict[str, Any]) -> str:
    """What of the work was kept, over all attempts, and which share of the time it took."""
    executed, lost = units.count(ledger["executed"]), units.count(ledger["executed"] - ledger["kept"])
    return (
        f"{units.counted(ledger['attempts'], 'attempt')}; {lost} of {executed} steps executed were lost; "
        f"steps that were kept took {ledger['goodput']:.0%} of {ledger['wall']:.1f} s"
    )


def learning(results: Results) -> Markup:
    history, metric = results.history, results.evaluation["metric"]["name"]
    name = units.NAMES.get(metric, metric)
    last = history["evaluations"][-1]
    world = history["world"]
    who = f"{units.counted(world['size'], 'process')} on {world['device']} ({world['backend']}), {world['precision']}"
    lead = (
        f"{units.count(history['parameters'])} parameters, {who}. {units.count(last['step'])} steps over "
        f"{last['epoch']:.4g} epochs{', stopped early' if history['stopped_early'] else ''}; the best weights, of step "
        f"{units.count(history['best']['step'])}, were kept. {goodput(results.ledger)}"
    )
    return section(
        "How it learnt",
        f"{lead}.",
        card("Loss", charts.loss_chart(history)),
        card(f"Validation {name}", charts.metric_chart(history, metric)),
    )


def quality(summary: RunSummary, results: Results) -> Markup:
    evaluation, signature = results.evaluation, results.signature
    classes = evaluation["classes"]
    cards = []
    if evaluation.get("scatter"):
        cards.append(card("Predicted against actual", charts.scatter_chart(evaluation["scatter"], signature.target)))
    if evaluation.get("roc"):
        cards.append(card("ROC", charts.roc_chart(evaluation["roc"], classes[1])))
    if evaluation.get("confusion"):
        cards += confusion(evaluation["confusion"], classes)
    if evaluation.get("calibration"):
        cards.append(
            card("Calibration: is it as sure as it is right?", charts.calibration_chart(evaluation["calibration"]))
        )
    cards.append(card("Beside the baseline", scores(summary.quality)))
    if len(cards) % 2:
        cards[-2:] = [element("div", *cards[-2:], class_="column")]
    lead = f"Scored once, on the {units.rows(summary.data.rows_test)} of the test split."
    return section("How good it is", lead, *cards)


def confusion(counts: list[list[int]], classes: list[str]) -> list[Markup]:
    if len(classes) <= charts.MOST_CLASSES_DRAWN:
        return [card("What it takes for what", charts.confusion_chart(counts, classes))]
    return [
        card("Most frequent mistakes", mistakes(counts, classes)),
        card("Weakest classes", weakest(counts, classes)),
    ]


def mistakes(counts: list[list[int]], classes: list[str]) -> Markup:
    """The cells off the diagonal that hold most, for a matrix that is too large to draw."""
    wrong = [(n, r, c) for r, line in enumerate(counts) for c, n in enumerate(line) if n and r != c]
    worst = sorted(wrong, key=lambda found: (-found[0], found[1], found[2]))[:WORST_SHOWN]
    if not worst:
        return element("p", "No row was taken for another class.")
    rows = [
        element(
            "tr", element("td", classes[r]), element("td", classes[c]), element("td", units.count(n), class_="number")
        )
        for n, r, c in worst
    ]
    head = element(
        "thead",
        element("tr", element("th", "truth"), element("th", "taken for"), element("th", "rows", class_="number")),
    )
    return element("table", head, element("tbody", *rows))


def weakest(counts: list[list[int]], classes: list[str]) -> Markup:
    """The classes of which the smallest share is recognised."""
    shares = [(line[r] / sum(line), sum(line), classes[r]) for r, line in enumerate(counts) if sum(line)]
    labels = ("class", "rows", "recognised")
    rows = [
        element("tr", cells(name, units.count(total), units.percent(share), labels=labels))
        for share, total, name in sorted(shares)[:WORST_SHOWN]
    ]
    return element("table", heads(labels), element("tbody", *rows))


def scores(q: QualityFigures) -> Markup:
    labels = ("metric", "ours", q.baseline)
    rows = [
        element(
            "tr",
            cells(
                units.NAMES.get(name, name),
                score(name, value, q.baseline_metrics.get(name)),
                score(name, q.baseline_metrics.get(name), value),
                labels=labels,
            ),
        )
        for name, value in sorted(q.model_metrics.items(), key=lambda item: ORDER.index(item[0]))
    ]
    return element("table", heads(labels), element("tbody", *rows))


def score(name: str, value: float | None, other: float | None) -> object:
    """A metric, emphasised where it is the better of the two."""
    text = units.metric(name, value)
    if value is None or other is None or value == other:
        return text
    better = value < other if name in units.LESS_IS_BETTER else value > other
    return element("b", text) if better else text


def variants(summary: RunSummary, results: Results) -> Markup:
    metric = summary.quality.metric
    name = units.NAMES.get(metric, metric)
    batches = list(dict.fromkeys(batch for variant in summary.variants for batch in variant.latency_p50_ms))
    spans = [f"batch {batch}, {p}" for batch in batches for p in ("p50", "p99")]
    labels = ["variant", "size", *spans, "rows/s", name, "off torch by"]
    body = [
        variant_rows(v, results.export["variants"][i], batches, labels, metric) for i, v in enumerate(summary.variants)
    ]
    machine = results.export["machine"]
    flags = f" with {', '.join(machine['flags'])}" if machine.get("flags") else ""
    threads = units.counted(machine["threads"], "thread")
    lead = f"Measured side by side in one run on {machine['cpu']}{flags}, {threads} each. "
    table = element("table", heads(labels), element("tbody", *body), class_="stack")
    return section(
        "What to deploy", join(lead, element("b", first_capital(summary.why)), "."), card(None, table, wide=True)
    )


def variant_rows(
    variant: VariantFigures, found: Mapping[str, Any], batches: list[str], labels: list[str], metric: str
) -> Markup:
    tag = element("span", "chosen", class_="tag") if variant.chosen else None
    latencies = [
        units.milliseconds(percentile.get(batch))
        for batch in batches
        for percentile in (variant.latency_p50_ms, variant.latency_p99_ms)
    ]
    rates = found.get("rows_per_second", {})
    difference = variant.largest_difference
    row = cells(
        element("span", variant.name, tag),
        units.size(variant.bytes),
        *latencies,
        units.count(round(max(rates.values()))) if rates else units.UNKNOWN,
        units.metric(metric, variant.value),
        units.UNKNOWN if difference is None else units.significant(difference, 2),
        labels=labels,
    )
    note = element("td", first_capital(variant.verdict), colspan=len(labels))
    return join(element("tr", row, class_="noted"), element("tr", note, class_="note"))


def network(results: Results) -> Markup:
    profile = results.network
    nodes = f" on {profile['nodes']} nodes" if profile["nodes"] > 1 else ""
    lead = (
        f"{units.counted(profile['world'], 'process')}{nodes}, {profile['backend']}, {profile['device']}, "
        f"torch {profile['torch']}. Every result was checked, element by element. "
    )
    if profile["world"] == 1:
        lead += "One process has no link, so its bus bandwidth is 0 by convention."
    return section(
        "The network it trained on",
        lead,
        card("Bus bandwidth", charts.bandwidth_chart(profile)),
        card("Time of a call: median, and p10 to p99 of the first", charts.time_chart(profile)),
    )


def stages(summary: RunSummary) -> Markup:
    longest = max((stage.seconds for stage in summary.stages if not stage.reused), default=0) or 1
    lines = [
        (stage.name, 0.0, element("span", "reused", class_="tag plain"))
        if stage.reused
        else (stage.name, stage.seconds / longest, units.seconds(stage.seconds))
        for stage in summary.stages
    ]
    lead = "Wall-clock time of each stage. What had been made before from the same inputs and code was reused."
    return section("Where the time went", lead, card(None, bars(lines), wide=True))
