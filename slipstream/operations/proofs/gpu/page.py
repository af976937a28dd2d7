"""Results as one HTML page, and as a row of the README's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from slipstream.operations.proofs.gpu.check import CheckFigure, CheckResult, State

HERE = Path(__file__).parent
NOT_RUN: State = "not run"
#: Columns of the README's table after the device: the check, its figure, and the format of the figure.
COLUMNS = (
    ("speed", "share of peak", "{:.1f} %"),
    ("kill and resume", "files equal bit for bit", "{:.0f} files equal"),
    ("saves", "stall, of the steps", "{:.2f} %"),
    ("loader", "over DataLoader", "{:.1f} x"),
    ("error", "until it was said", "{:.1f} s"),
)
TITLES = (
    "GPU",
    "checks passed",
    "bf16 speed, of peak",
    "resumed after kills",
    "save stall, of the steps",
    "loader speed, of whole batches",
    "time to error",
)
HEADER = f"| {' | '.join(TITLES)} |"


def page(machine: str, results: Sequence[CheckResult], seconds: float, quick: bool) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    counts = {state: sum(each.state == state for each in results) for state in ("held", "failed", NOT_RUN)}
    return environment.from_string((HERE / "page.html").read_text(encoding="utf-8")).render(
        machine=machine, results=results, counts=counts, seconds=seconds, quick=quick
    )


def row(device: str, results: Sequence[CheckResult]) -> str:
    """Return a row of the README's table."""
    figures: Mapping[str, Mapping[str, CheckFigure]] = {
        each.name: {figure.name: figure for figure in each.figures} for each in results if each.state == "held"
    }
    tried = [each for each in results if each.state != NOT_RUN]
    cells = [f"{sum(each.state == 'held' for each in tried)} of {len(tried)}"]
    for check, name, form in COLUMNS:
        figure = figures.get(check, {}).get(name)
        cells.append(form.format(figure.value) if figure else NOT_RUN)
    return "| " + " | ".join([device, *cells]) + " |"


def fill(readme: str, device: str, results: Sequence[CheckResult]) -> str:
    """Return the README with this device's row in its table, which replaces an older row or the "not run" row."""
    lines = readme.split("\n")
    first = lines.index(HEADER) + 2
    last = next(place for place in range(first, len(lines)) if not lines[place].startswith("|"))
    others = [line for line in lines[first:last] if not line.startswith(("| no GPU", f"| {device} |"))]
    return "\n".join([*lines[:first], *others, row(device, results), *lines[last:]])
