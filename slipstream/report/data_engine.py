"""Writes the data card, and the directory of a run that only prepares data. Loads nothing that draws charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.prepared.card import Card
from slipstream.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.report.pages.rendering import render
from slipstream.report.run_directory import CARD, CARD_DATA, PREPARED, link_artifact, new_run
from slipstream.report.stage_results import data_figures, quarantine_reasons, quarantined_rows
from slipstream.report.summary import DataSummary
from slipstream.stages import StageRun


def build_data(runs: Path, prepared: PreparedData, stages: Sequence[StageRun], address: str = "") -> DataSummary:
    """Write a directory under ``runs`` with the card, and with the prepared data unless they stay at the URI
    ``address``. Raises ``DamagedArtifact`` if the card is not what was written."""
    card = prepared.card

    def fill(directory: Path, now: datetime) -> None:
        write_card(prepared.artifact, card, directory, now)
        if not address:
            link_artifact(prepared.artifact, directory / PREPARED)

    return DataSummary(
        directory=str(new_run(runs, fill)),
        card=CARD,
        prepared=address or PREPARED,
        data=data_figures(card, prepared.signature),
        quarantined=quarantine_reasons(prepared.artifact),
        roles=dict(Counter(column["role"] for column in card["columns"]).most_common()),
        warnings=card["warnings"],
        stages=list(stages),
    )


def write_card(prepared: Artifact, card: Card, directory: Path, now: datetime) -> None:
    """The data card as the bytes of ``card.json`` and as a page."""
    (directory / CARD_DATA).write_bytes(prepared.read_bytes(CARD_DATA))
    page = data_card_page(card, quarantined_rows(prepared), now)
    (directory / CARD).write_text(page, encoding="utf-8")


def data_card_page(card: Card, quarantined: Sequence[Mapping[str, object]], made_at: datetime) -> str:
    """Every column of the prepared data, and the first rows that were set aside. ``card`` is the content of
    ``card.json``, ``quarantined`` the first rows of ``quarantine.parquet``."""
    totals = {split: sum(counts[split] for counts in card["classes"].values()) for split in SPLITS}
    return render("data_card.html", card=card, class_totals=totals, quarantined=quarantined, made=made_at)
