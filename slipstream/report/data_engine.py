"""Writes the data card, and the directory of a run that only prepares data. Loads nothing that draws charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.prepared.data import PreparedData
from slipstream.report.figures import StageFigures
from slipstream.report.pages.data_card_page import data_card_page
from slipstream.report.run_directory import link_artifact, new_run
from slipstream.report.stage_results import quarantined_rows
from slipstream.report.summary import DataSummary
from slipstream.report.summary_builder import CARD, CARD_DATA, PREPARED, data_summary


def build_data(runs: Path, prepared: PreparedData, stages: Sequence[StageFigures], address: str = "") -> DataSummary:
    """Write a directory under ``runs`` with the card, and with the prepared data unless they stay at the URI
    ``address``. Raises ``DamagedArtifact`` if the card is not what was written."""

    def fill(directory: Path, now: datetime) -> None:
        write_card(prepared.artifact, prepared.card, directory, now)
        if not address:
            link_artifact(prepared.artifact, directory / PREPARED)

    directory = new_run(runs, fill)
    return data_summary(prepared, stages, str(directory), address)


def write_card(prepared: Artifact, card: Mapping[str, Any], directory: Path, now: datetime) -> None:
    """The data card as the bytes of ``card.json`` and as a page."""
    (directory / CARD_DATA).write_bytes(prepared.read_bytes(CARD_DATA))
    page = data_card_page(card, quarantined_rows(prepared), now)
    (directory / CARD).write_text(page, encoding="utf-8")
