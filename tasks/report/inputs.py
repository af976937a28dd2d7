"""The sections of the page that say what went in: the data and the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.report import units
from tasks.report.charts import shortened
from tasks.report.markup import Markup, element, join
from tasks.report.parts import bars, card, section
from tasks.report.results import Results
from tasks.report.summarise import CARD
from tasks.report.summary import DataFigures, RunSummary

REASONS_SHOWN = 8
CLASSES_SHOWN = 12
#: Columns that are listed at once, and those that can be unfolded.
COLUMNS_SHOWN, COLUMNS_LISTED = 16, 400
VALUES_SHOWN = 3


def data(summary: RunSummary, results: Results) -> Markup:
    """Rows by split and class, what needs a look, what was set aside, and every column."""
    d, found = summary.data, results.card
    notes = []
    if found["warnings"]:
        items = (element("li", warning) for warning in found["warnings"])
        notes.append(card("Worth a look", element("ul", *items, class_="list warnings")))
    if results.quarantined:
        notes.append(card("Quarantined", quarantine(results)))
    rows = card("Rows", splits(d), classes(found["classes"]), wide=not notes)
    beside = element("div", *notes, class_="column") if notes else None
    columns = card(f"Columns: {units.count(len(found['columns']))}", *column_tables(found["columns"]), wide=True)
    read = f"{units.rows(d.rows_read)} read, {units.count(d.rows_kept)} kept"
    lead = f"{read}, {units.count(d.rows_quarantined) if d.rows_quarantined else 'none'} quarantined."
    if found.get("sampled_rows", d.rows_kept) < d.rows_kept:
        lead += f" Distributions are those of a sample of {units.rows(found['sampled_rows'])}."
    card_link = element("a", "The data card", href=CARD)
    return section(
        "The data",
        join(lead, " ", card_link, " says more of each column."),
        *(part for part in (rows, beside, columns) if part is not None),
    )


def splits(d: DataFigures) -> Markup:
    parts = list(enumerate((("train", d.rows_train), ("validation", d.rows_validation), ("test", d.rows_test))))
    strip = (element("i", class_=f"c{i}", style=f"flex: {rows}") for i, (_, rows) in parts)
    names = (element("span", element("i", class_=f"key c{i}"), f"{name} {units.count(n)}") for i, (name, n) in parts)
    return join(element("div", *strip, class_="splits"), element("div", *names, class_="legend"))


def classes(found: Mapping[str, Mapping[str, int]]) -> Markup | None:
    """How frequent each class is; of many, only the most frequent. Nothing for a regression."""
    if not found:
        return None
    totals = sorted(((sum(rows.values()), label) for label, rows in found.items()), key=lambda item: -item[0])
    most, rows = totals[0][0] or 1, sum(total for total, _ in totals) or 1
    shown = totals[:CLASSES_SHOWN]
    lines = [
        (shortened(label), total / most, f"{units.count(total)} ({units.percent(total / rows)})")
        for total, label in shown
    ]
    left = len(totals) - len(shown)
    return join(bars(lines), element("p", f"and {units.count(left)} more classes", class_="soft") if left else None)


def column_tables(columns: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """The first columns, and most of the others to unfold."""
    first, more = columns[:COLUMNS_SHOWN], columns[COLUMNS_SHOWN:COLUMNS_LISTED]
    tables = [column_table(first)]
    if more:
        name = f"{units.count(len(more))} more columns"
        tables.append(element("details", element("summary", name), column_table(more)))
    if len(columns) > COLUMNS_LISTED:
        left = f"{units.count(len(columns) - COLUMNS_LISTED)} further columns are in card.json of the prepared data."
        tables.append(element("p", left, class_="soft"))
    return tables


def column_table(columns: Sequence[Mapping[str, Any]]) -> Markup:
    labels = ("column", "used as", "type", "missing", "distinct", "what is in it")
    rows = (
        element("tr", *(element("td", value, data_label=label) for value, label in zip(line, labels, strict=True)))
        for line in map(column_line, columns)
    )
    head = element("tr", *(element("th", label) for label in labels))
    return element("table", element("thead", head), element("tbody", *rows), class_="columns")


def column_line(column: Mapping[str, Any]) -> list[object]:
    missing, distinct = column.get("missing"), column.get("distinct")
    return [
        element("b", column["name"]),
        column["role"],
        column["type"],
        units.UNKNOWN if missing is None else units.count(missing),
        units.UNKNOWN if distinct is None else units.count(distinct),
        contents(column),
    ]


def contents(column: Mapping[str, Any]) -> str:
    """Why a column is not used, else its most frequent values, else its range."""
    if column.get("why"):
        return str(column["why"])
    if column.get("top"):
        top = ", ".join(
            f"{shortened(str(value))} ({units.count(rows)})" for value, rows in column["top"][:VALUES_SHOWN]
        )
        return f"{top}, …" if column["distinct"] > VALUES_SHOWN else top
    if "mean" in column:
        low, high, mean, std = (units.value(column[key]) for key in ("min", "max", "mean", "std"))
        return f"{low} to {high}, mean {mean} ± {std}"
    return ""


def quarantine(results: Results) -> Markup:
    items = [
        element(
            "li",
            element("b", units.rows(q.rows)),
            f": {q.reason}",
            f" in column {q.column}" if q.column else None,
            element("span", f" (first in {q.file}, line {q.line})", class_="soft"),
        )
        for q in results.quarantined[:REASONS_SHOWN]
    ]
    return element("ul", *items, class_="list")


def settings(config: Mapping[str, Any]) -> Markup:
    """Every setting by its path, one card per section."""
    shown = (card(name, setting_table(flat(value))) for name, value in config.items() if isinstance(value, Mapping))
    return join(
        element("h2", "How it was set"),
        element("p", "The whole configuration of this run, defaults included.", class_="lead"),
        element("div", *shown, class_="settings"),
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def setting_table(values: Iterable[tuple[str, Any]]) -> Markup:
    rows = (
        element("tr", element("td", name), element("td", element("code", spelled(value)))) for name, value in values
    )
    return element("table", element("tbody", *rows))


def spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(spelled(item) for item in value) if value else "none"
    if isinstance(value, str):
        return value if value.strip() else f'"{value}"'
    return "none" if value in ({}, None) else f"{value}"


def versions(results: Results) -> str:
    machine = results.export["machine"]
    named = [f"{name} {machine[name]}" for name in ("torch", "onnx", "onnxruntime") if name in machine]
    return ", ".join([*named, f"{machine.get('cores', '?')} cores"])
