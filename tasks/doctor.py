"""Flyte task that checks its node."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from flytekit import Deck, task

from slipstream.flyte.metadata import WITH_DECK, stage_metadata
from slipstream.flyte.stage import map_errors
from slipstream.operations.doctor.findings import NodeReading, readings_text

#: Task settings: a node as for training, never cached, no retries.
PLACED = {**stage_metadata("train"), "cache": False, "retries": 0, "timeout": timedelta(hours=1)}


@dataclass(frozen=True)
class NodeCheck:
    """Host name and problems of one pod's node."""

    host: str
    problems: list[str]


@task(**WITH_DECK, **PLACED)
@map_errors
def check_node(pod: int, store: str, endpoint: str) -> NodeCheck:
    """Check the node of pod ``pod``; the table of readings is shown in the deck and the log."""
    from slipstream.operations.doctor.node import read_node

    readings = read_node(store, endpoint)
    print(readings_text(readings, 120), flush=True)
    Deck("Node", as_html(readings))
    problems = [f"{reading.what}: {reading.problem}" for reading in readings if reading.problem]
    return NodeCheck(socket.gethostname(), problems)


def as_html(readings: Iterable[NodeReading]) -> str:
    import pandas as pd

    rows = [(reading.what, reading.found, reading.problem) for reading in readings]
    with pd.option_context("display.max_colwidth", None):
        return pd.DataFrame(rows, columns=["what", "found", "problem"]).to_html(index=False, border=0)
