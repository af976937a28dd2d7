"""What preparing data came to by itself: ``runs/<timestamp>/`` with the data card and the prepared data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tasks.artifacts.format import MANIFEST, Artifact, link_or_copy
from tasks.artifacts.prepared import PreparedData
from tasks.report.engine import copy_card, new_run
from tasks.report.results import read_quarantine
from tasks.report.summarise import CARD, data_figures
from tasks.report.summary import DataSummary, StageFigures

PREPARED = "prepared"


def build_data(runs: Path, prepared: PreparedData, stages: Sequence[StageFigures], address: str = "") -> DataSummary:
    """Make a new directory under ``runs`` with the card; and the prepared data, unless it stays at ``address``."""
    artifact, card = prepared.artifact, prepared.card

    def fill(directory: Path, _: datetime) -> None:
        copy_card(artifact, directory)
        if not address:
            link(artifact, directory / PREPARED)

    return DataSummary(
        directory=str(new_run(runs, fill)),
        card=CARD,
        prepared=address or PREPARED,
        data=data_figures(card, prepared.signature),
        quarantined=read_quarantine(artifact.read_bytes("quarantine.parquet")),
        roles=dict(Counter(column["role"] for column in card["columns"]).most_common()),
        warnings=card["warnings"],
        stages=list(stages),
    )


def link(artifact: Artifact, directory: Path) -> None:
    """The artifact once more, in ``directory``: the same bytes on the disk where it can be, else copied."""
    for name in (*artifact.files, MANIFEST):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(artifact.path(name), target)
