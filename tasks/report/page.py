"""The page: one HTML file that says what the run came to, loads nothing, and reads well on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tasks.report import headline, inputs, sections
from tasks.report.markup import Markup, element
from tasks.report.results import Results
from tasks.report.style import CSS
from tasks.report.summary import RunSummary

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body { margin: 0; }</style>
"""


def document(summary: RunSummary, results: Results, config: Mapping[str, Any], made: datetime) -> str:
    """The page as a file. ``config`` is everything that was set, by section; ``made`` is local time."""
    title = element("title", f"Slipstream: {summary.data.source}")
    body = element(
        "main",
        headline.headline(summary),
        sections.learning(results),
        sections.quality(summary, results),
        sections.variants(summary, results),
        sections.network(results),
        sections.stages(summary),
        inputs.data(summary, results),
        inputs.settings(config),
    )
    foot = element("footer", f"Slipstream, {made:%d %B %Y, %H:%M}. {inputs.versions(results)}")
    page = element("div", element("style", Markup(CSS)), body, foot, class_="slipstream")
    return f"{HEAD}{title}</head>\n<body>{page}</body>\n</html>\n"
