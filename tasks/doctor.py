"""Flyte task that checks its node."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape

from flytekit import Deck, task

from slipstream.flyte.metadata import WITH_DECK, stage_metadata
from slipstream.flyte.stage import map_errors
from slipstream.operations.doctor.findings import readings_text

#: Task settings: a node as for training, never cached, no retries.
PLACED = {**stage_metadata("train"), "cache": False, "retries": 0, "timeout": timedelta(hours=1)}


@dataclass(frozen=True)
class NodeCheck:
    """Host name and problems of one pod's node, and what was read there, found and wrong."""

    host: str
    problems: list[str]
    readings: list[list[str]]


@task(**PLACED)
@map_errors
def check_node(pod: int, store: str, endpoint: str) -> NodeCheck:
    """Check the node of pod ``pod``; the table of readings is in the log."""
    from slipstream.operations.doctor.node import read_node

    readings = read_node(store, endpoint)
    print(readings_text(readings, 120), flush=True)
    problems = [f"{reading.what}: {reading.problem}" for reading in readings if reading.problem]
    rows = [[reading.what, reading.found, reading.problem] for reading in readings]
    return NodeCheck(socket.gethostname(), problems, rows)


@task(**WITH_DECK, **stage_metadata("report", cached=False))
@map_errors
def show_nodes(checks: list[NodeCheck]) -> list[NodeCheck]:
    """Show the readings of all nodes in one deck: elements of map tasks have no decks."""
    Deck("Nodes", "".join(f"<h2>{escape(check.host)}</h2>{as_html(check.readings)}" for check in checks))
    return checks


def as_html(readings: Sequence[Sequence[str]]) -> str:
    import pandas as pd

    with pd.option_context("display.max_colwidth", None):
        return pd.DataFrame(readings, columns=["what", "found", "problem"]).to_html(index=False, border=0)
