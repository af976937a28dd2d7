"""Writes the directory of a whole run, or of one that only exports: report, figures and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.artifacts.format import Artifact, canonical_json
from slipstream.artifacts.results.compression import Compression
from slipstream.artifacts.results.export import KIND, SIGNATURE, read_export
from slipstream.artifacts.results.promotion import Promotion
from slipstream.artifacts.results.training import TRACE
from slipstream.artifacts.store import Store
from slipstream.report.data_engine import write_card
from slipstream.report.figures import ScheduleFigures, StageFigures, to_json
from slipstream.report.pages.rendering import render
from slipstream.report.pages.report_page import report_page
from slipstream.report.run_directory import copy_model, new_run
from slipstream.report.stage_results import Results
from slipstream.report.summary import ExportSummary, RunSummary
from slipstream.report.summary_builder import REPORT, SUMMARY, export_summary, run_summary


def build(  # noqa: PLR0913 - all that a run has to say
    runs: Path,
    results: Results,
    stages: Sequence[StageFigures],
    config: Mapping[str, Any],
    schedule: ScheduleFigures | None = None,
    promotion: Promotion | None = None,
    compression: Compression | None = None,
    store: Store | None = None,
) -> RunSummary:
    """Write the directory of a whole run under ``runs`` and return what is in it.

    ``config`` is the whole configuration as nested dictionaries by section; ``schedule`` is given if a schedule started
    the run, ``promotion`` if its model was to go into service, ``compression`` if its network was to become smaller;
    charts are kept in ``store``.
    Raises ``DamagedArtifact`` if the exported model or the data card is not what was written.
    """
    summary = run_summary(results, stages, "", schedule, promotion, compression)

    def fill(directory: Path, now: datetime) -> None:
        copy_model(results.exported, directory)
        write_card(results.prepared, results.card, directory, now)
        if results.operations:
            (directory / TRACE).write_bytes(results.trained.read_bytes(TRACE))
        (directory / SUMMARY).write_bytes(canonical_json(to_json(summary)))
        page = report_page(summary, results, config, now, store)
        (directory / REPORT).write_text(page, encoding="utf-8")

    return dataclasses.replace(summary, directory=str(new_run(runs, fill)))


def build_export(runs: Path, exported: Path, stages: Sequence[StageFigures]) -> ExportSummary:
    """Write the directory of the run under ``runs`` and return what is in it.

    Raises ``DamagedArtifact`` if the exported model is not what was written.
    """
    from slipstream.report.pages import charts

    export, artifact = read_export(exported), Artifact.open(exported, KIND)
    summary = export_summary(export, artifact.read_json(SIGNATURE)["target"], stages, directory="")

    def fill(directory: Path, now: datetime) -> None:
        copy_model(artifact, directory)
        (directory / SUMMARY).write_bytes(canonical_json(to_json(summary)))
        drawn = {"variants": charts.quality_against_latency(export)}
        page = render("export.html", summary=summary, export=export, metric=summary.metric, charts=drawn, made=now)
        (directory / REPORT).write_text(page, encoding="utf-8")

    return dataclasses.replace(summary, directory=str(new_run(runs, fill)))
