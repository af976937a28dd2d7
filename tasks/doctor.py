"""The Flyte task that looks at the node on which it runs."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from flytekit import Deck, task

from slipstream.doctor.findings import Reading, readings_text
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
    from slipstream.doctor.node import read_node

    readings = read_node(store, endpoint)
    print(readings_text(readings, 120), flush=True)
    Deck("Node", as_html(readings))
    problems = [f"{reading.what}: {reading.problem}" for reading in readings if reading.problem]
    return NodeCheck(socket.gethostname(), problems)


def as_html(readings: Iterable[Reading]) -> str:
    """A table, in which all text is escaped."""
    import pandas as pd

    rows = [(reading.what, reading.found, reading.problem) for reading in readings]
    with pd.option_context("display.max_colwidth", None):
        return pd.DataFrame(rows, columns=["what", "found", "problem"]).to_html(index=False, border=0)
