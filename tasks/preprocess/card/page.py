"""The data card as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from tasks.artifacts.format import ArtifactWriter
from tasks.preprocess.quarantine import BadRow

STYLE = """
:root { --ink: #1c2733; --soft: #607080; --line: #dfe5ea; --fill: #3b7dd8; --warn: #b25b00; --back: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa8b5; --line: #33404c; --fill: #6ea5ee; --warn: #f0a24a; --back: #161c22 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 84rem; padding: 2rem 1rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin: 0 }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { color: var(--soft); margin: .2rem 0 1rem }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .9rem; min-width: 7.5rem }
.tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums }
.tile span { color: var(--soft); font-size: .85rem }
ul { padding-left: 1.2rem }
li { color: var(--warn); margin: .2rem 0; overflow-wrap: anywhere }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 500; font-size: .85rem }
th:first-child, td:first-child, .left { text-align: left }
td small { color: var(--soft) }
td.wrap { white-space: normal; overflow-wrap: anywhere; min-width: 10rem }
svg { display: block }
rect { fill: var(--fill) }
"""
HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
#: Quarantined rows that the page lists; all are in quarantine.parquet.
LISTED = 50
BAR_WIDTH, BAR_HEIGHT = 120, 28


def write_card(writer: ArtifactWriter, card: dict[str, Any], bad: list[BadRow]) -> None:
    """Write the card as JSON and as a page; ``bad`` are all rows set aside."""
    writer.write_json("card.json", card)
    writer.write_bytes("card.html", render(card, bad[:LISTED]).encode())


def render(card: dict[str, Any], quarantined: list[BadRow]) -> str:
    """``card`` as in card.json; ``quarantined``: the first rows set aside."""
    rows = card["rows"]
    tiles = "".join(
        f'<div class="tile"><b>{count:,}</b><span>{escape(name)}</span></div>' for name, count in rows.items()
    )
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in card["warnings"])
    parts = [
        f"<h1>{escape(card['source'])}</h1><p>{escape(card['task'])} of {escape(card['target'])}</p>",
        f'<div class="tiles">{tiles}</div>',
        f"<h2>To know</h2><ul>{warnings}</ul>" if warnings else "",
        f"<h2>Classes</h2>{classes_table(card['classes'])}" if card["classes"] else "",
        f"<h2>Columns</h2>{sampled(card)}{columns_table(card['columns'], rows['kept'])}",
        f"<h2>Rows set aside</h2>{quarantine_table(quarantined)}" if quarantined else "",
    ]
    title = f"<title>Data card: {escape(card['source'])}</title>"
    head = f"<head>{HEAD}{title}<style>{STYLE}</style></head>"
    return f'<!doctype html><html lang="en">{head}<body>{"".join(parts)}</body></html>\n'


def table(head: list[str], body: list[list[str]]) -> str:
    top = "".join(f"<th>{name}</th>" for name in head)
    lines = "".join("<tr>" + "".join(cells) + "</tr>" for cells in body)
    return f'<div class="scroll"><table><tr>{top}</tr>{lines}</table></div>'


def cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"


def classes_table(classes: dict[str, dict[str, int]]) -> str:
    totals = {
        split: max(1, sum(counts[split] for counts in classes.values())) for split in next(iter(classes.values()))
    }
    body = [
        [cell(escape(name))]
        + [cell(f"{count:,} <small>{count / totals[split]:.1%}</small>") for split, count in counts.items()]
        for name, counts in classes.items()
    ]
    return table(["class", *totals], body)


def sampled(card: dict[str, Any]) -> str:
    """Which figures are not of all rows."""
    if not card.get("of_sample"):
        return ""
    names = ", ".join(card["of_sample"])
    return f"<p>Of a sample of {card['sampled_rows']:,} rows: {names}. All else is of every row.</p>"


def columns_table(columns: list[dict[str, Any]], kept: int) -> str:
    head = [
        "column",
        "role",
        "type",
        "missing",
        "distinct",
        "mean",
        "std",
        "min",
        "median",
        "max",
        "alone",
        "distribution",
    ]
    body = []
    for column in columns:
        missing = column.get("missing", 0)
        numbers = [number(column.get(key)) for key in ("mean", "std", "min", "median", "max")]
        alone = f"{column['alone']:.0%}" if "alone" in column else ""
        body.append(
            [
                cell(escape(column["name"])),
                cell(escape(column["role"])),
                cell(escape(column["type"])),
                cell(f"{missing:,} <small>{missing / max(1, kept):.1%}</small>" if missing else ""),
                cell(f"{column['distinct']:,}" if "distinct" in column else ""),
                *map(cell, numbers),
                cell(alone),
                cell(bars(column), "left"),
            ]
        )
    return table(head, body)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def bars(column: dict[str, Any]) -> str:
    """A small histogram, of values in order or of texts by frequency."""
    counts = column.get("histogram", {}).get("counts") or [count for _, count in column.get("top", [])]
    if not counts:
        return escape(column.get("why", ""))
    step, highest = BAR_WIDTH / len(counts), max(1, *counts)
    drawn = "".join(
        f'<rect x="{place * step:.1f}" y="{BAR_HEIGHT * (1 - count / highest):.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{BAR_HEIGHT * count / highest:.1f}"/>'
        for place, count in enumerate(counts)
    )
    return f'<svg width="{BAR_WIDTH}" height="{BAR_HEIGHT}" role="img" aria-label="distribution">{drawn}</svg>'


def quarantine_table(rows: list[BadRow]) -> str:
    body = [
        [
            cell(escape(row.file)),
            cell(f"{row.line:,}"),
            cell(escape(row.column)),
            cell(escape(row.reason), "left"),
            cell(escape(row.raw[:120]), "left wrap"),
        ]
        for row in rows
    ]
    return table(["file", "line", "column", "reason", "found"], body)
