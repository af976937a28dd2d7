"""Writes the directory of a run: pages, figures and model, or data card and prepared data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tasks.artifact import Artifact, canonical_json
from tasks.preprocess.prepared import PreparedData
from tasks.report.data_card_page import data_card_page
from tasks.report.report_page import report_page
from tasks.report.run_directory import copy_model, link_artifact, new_run
from tasks.report.stage_results import Results, quarantined_rows
from tasks.report.summary import DataSummary, RunSummary, StageFigures, to_json
from tasks.report.summary_builder import CARD, CARD_DATA, PREPARED, REPORT, SUMMARY, data_summary, run_summary


def build(runs: Path, results: Results, stages: Sequence[StageFigures], config: Mapping[str, Any]) -> RunSummary:
    """Write the directory of a whole run under ``runs`` and return what is in it.

    ``config`` is the whole configuration as nested dictionaries by section. Raises ``DamagedArtifact`` if the exported
    model or the data card is not what was written.
    """
    summary = run_summary(results, stages, directory="")

    def fill(directory: Path, now: datetime) -> None:
        copy_model(results.exported, results.export, directory)
        write_card(results.prepared, results.card, directory, now)
        (directory / SUMMARY).write_bytes(canonical_json(to_json(summary)))
        page = report_page(summary, results, config, now)
        (directory / REPORT).write_text(page, encoding="utf-8")

    return dataclasses.replace(summary, directory=str(new_run(runs, fill)))


def build_data(runs: Path, prepared: PreparedData, stages: Sequence[StageFigures], address: str = "") -> DataSummary:
    """Write the directory of a run that only prepares: the card, and the prepared data unless they stay at the URI
    ``address``."""

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
