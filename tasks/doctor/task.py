"""The Flyte task that looks at the node on which it runs."""

from __future__ import annotations

import html
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from flytekit import Deck, task

from tasks.doctor.findings import Reading, readings_text
from tasks.flyte.metadata import WITH_DECK, on
from tasks.flyte.stage import map_errors

#: As training is placed, so that it lands where training does; but never cached, and it costs minutes.
PLACED = {**on("train"), "cache": False, "retries": 0, "timeout": timedelta(hours=1)}


@dataclass(frozen=True)
class NodeCheck:
    """What one pod found."""

    host: str
    problems: list[str]


@task(**WITH_DECK, **PLACED)
@map_errors
def check_node(pod: int, store: str, endpoint: str) -> NodeCheck:
    """Read the node of pod number ``pod``; its table is in the deck and in the log."""
    from tasks.doctor.node import read_node

    readings = read_node(store, endpoint)
    print(readings_text(readings, 120), flush=True)
    Deck("Node", as_html(readings))
    problems = [f"{reading.what}: {reading.problem}" for reading in readings if reading.problem]
    return NodeCheck(socket.gethostname(), problems)


def as_html(readings: Iterable[Reading]) -> str:
    rows = ((reading.what, reading.found, reading.problem) for reading in readings)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    head = "<tr><th>what</th><th>found</th><th>problem</th></tr>"
    return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
