"""Writer of the data card and of the directory of a data-only run.

Imports no drawing libraries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from slipstream.pipeline.report.pages.rendering import render_page
from slipstream.pipeline.report.run_directory import CARD, CARD_DATA, PREPARED, link_artifact, new_run
from slipstream.pipeline.report.stage_results import data_figures, quarantine_reasons, quarantined_rows
from slipstream.pipeline.report.summary import DataSummary
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.card import Card
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.stages import StageRun


def build_data(runs: Path, prepared: PreparedData, stages: Sequence[StageRun], address: str = "") -> DataSummary:
    """Write a run directory under ``runs`` with the data card and the prepared data.

    Prepared data at the URI ``address`` are not copied. Raises ``DamagedArtifact`` if the card is damaged.
    """
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
    """Write the data card as ``card.json``, byte for byte, and as a page."""
    (directory / CARD_DATA).write_bytes(prepared.read_bytes(CARD_DATA))
    page = data_card_page(card, quarantined_rows(prepared), now)
    (directory / CARD).write_text(page, encoding="utf-8")


def data_card_page(card: Card, quarantined: Sequence[Mapping[str, object]], made_at: datetime) -> str:
    """Return the page with every prepared column and the first quarantined rows.

    ``card`` is the content of ``card.json``.
    """
    totals = {split: sum(counts[split] for counts in card["classes"].values()) for split in SPLITS}
    return render_page("data_card.html", card=card, class_totals=totals, quarantined=quarantined, made=made_at)
