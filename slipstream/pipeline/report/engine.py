"""Writer of the directory of a whole or export-only run: report, figures, model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.pipeline.report.against_plan import TRAIN, against_plan
from slipstream.pipeline.report.costs import stage_costs
from slipstream.pipeline.report.figures import ScheduleFigures
from slipstream.pipeline.report.pages.rendering import render_page
from slipstream.pipeline.report.pages.report_page import report_page
from slipstream.pipeline.report.run_directory import (
    CARD,
    CARD_DATA,
    DATED_CARD,
    MODEL,
    PREPARED,
    RAW_MODEL,
    REPORT,
    SUMMARY,
    TRAINED,
    RunOrigin,
    copy_model,
    link_artifact,
    model_file,
    new_run,
)
from slipstream.pipeline.report.stage_results import (
    StageResults,
    answers_sentence,
    data_figures,
    network_figures,
    quarantine_reasons,
    quarantined_rows,
)
from slipstream.pipeline.report.summary import DataSummary, ExportSummary, RunSummary, summary_content
from slipstream.pipeline.report.tracking import write_events
from slipstream.shared.artifacts.format import Artifact, canonical_json
from slipstream.shared.artifacts.prepared.card import Card
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.artifacts.records import read_record
from slipstream.shared.artifacts.results.compression import Compression
from slipstream.shared.artifacts.results.evaluation import PlotData
from slipstream.shared.artifacts.results.export import KIND, MODEL_CARD, SIGNATURE, DeployedSignature, read_export
from slipstream.shared.artifacts.results.ledger import read_figures
from slipstream.shared.artifacts.results.scoring import Promotion
from slipstream.shared.artifacts.results.sweep import Sweep
from slipstream.shared.artifacts.results.training import TRACE
from slipstream.shared.artifacts.workspaces import ArtifactStore
from slipstream.shared.models.metrics import HEADLINE
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.stages import StageRun


def build_report(  # noqa: PLR0913 - all that a run has to say
    runs: Path,
    results: StageResults,
    stages: Sequence[StageRun],
    config: Mapping[str, object],
    schedule: ScheduleFigures | None = None,
    promotion: Promotion | None = None,
    compression: Compression | None = None,
    store: ArtifactStore | None = None,
    sweep: Sweep | None = None,
    origin: RunOrigin | None = None,
    links: bool = True,
) -> RunSummary:
    """Write the directory of a whole run under ``runs`` and return its summary.

    ``config`` is the whole configuration by section. Charts are cached in ``store``. With ``links`` the
    directory has prepared data and trained model, too, as hard links.

    Raises ``DamagedArtifact`` if the exported model or the data card is damaged.
    """
    also: dict[str, Any] = {"schedule": schedule, "promotion": promotion, "compression": compression, "sweep": sweep}
    summary = replace(run_summary(results, stages, ""), **also)

    def fill(directory: Path, now: datetime) -> None:
        copy_model(results.exported, directory)
        write_dated_card(directory, now)
        write_card(results.prepared, results.card, directory, now)
        if links:
            link_artifact(results.prepared, directory / PREPARED)
            link_artifact(results.trained, directory / TRAINED)
        if results.operations:
            (directory / TRACE).write_bytes(results.trained.read_bytes(TRACE))
        made = {"run": {**vars(origin), "data": results.prepared.content}} if origin else {}
        (directory / SUMMARY).write_bytes(canonical_json({**summary_content(summary), **made}))
        changed = origin.changed if origin else {}
        page = report_page(summary, results, config, now, store, changed, linked_files(directory, summary))
        (directory / REPORT).write_text(page, encoding="utf-8")
        write_events(directory, results.history)

    return replace(summary, directory=str(new_run(runs, fill, summary.data.source)))


def linked_files(directory: Path, summary: RunSummary) -> list[tuple[str, str]]:
    """Return names and paths of the files of a run that its page links to."""
    named = {
        "model": summary.model_file,
        "model for raw columns": f"{MODEL}/{RAW_MODEL}",
        "model card": DATED_CARD,
        **{f"{each.name}/": f"{MODEL}/{each.name}" for each in summary.export.libraries},
        "prepared data": PREPARED,
        "trained model": TRAINED,
    }
    return [(name, path) for name, path in named.items() if (directory / path).exists()]


def run_summary(results: StageResults, stages: Sequence[StageRun], directory: str) -> RunSummary:
    costs, training = stage_costs(stages, results.devices), read_figures(results.trained.directory)
    trained_here = any(stage.name == TRAIN and not stage.reused for stage in stages)
    return RunSummary(
        directory=directory,
        report=REPORT,
        model=MODEL,
        model_file=model_file(results.export),
        data=data_figures(results.card, results.signature),
        evaluation=replace(results.evaluation, **vars(PlotData())),
        export=results.export,
        network=network_figures(results.network.profile) if results.network else None,
        stages=list(stages),
        bottleneck=results.attempt.bottleneck,
        costs=costs,
        training=training,
        against_plan=against_plan(current_profile().plan, training, costs) if trained_here else None,
    )


def build_export(runs: Path, exported: Path, stages: Sequence[StageRun]) -> ExportSummary:
    """Write an export-only run under ``runs``; raises ``DamagedArtifact`` for a damaged model."""
    from slipstream.pipeline.report.pages import charts

    export, artifact = read_export(exported), Artifact.open(exported, KIND)
    summary = ExportSummary(
        directory="",
        report=REPORT,
        model=MODEL,
        model_file=model_file(export),
        target=read_record(artifact, SIGNATURE, DeployedSignature).target,
        metric=HEADLINE[export.task][0],
        export=export,
        stages=list(stages),
    )

    def fill(directory: Path, now: datetime) -> None:
        copy_model(artifact, directory)
        (directory / SUMMARY).write_bytes(canonical_json(summary_content(summary)))
        drawn = {"variants": charts.quality_against_latency(export)} if export.variants else {}
        page = render_page("export.html", summary=summary, export=export, metric=summary.metric, charts=drawn, made=now)
        (directory / REPORT).write_text(page, encoding="utf-8")

    return replace(summary, directory=str(new_run(runs, fill)))


# Imports no drawing libraries.
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
        directory=str(new_run(runs, fill, card["source"])),
        card=CARD,
        prepared=address or PREPARED,
        data=data_figures(card, prepared.signature),
        quarantined=quarantine_reasons(prepared.artifact),
        roles=dict(Counter(column["role"] for column in card["columns"]).most_common()),
        warnings=card["warnings"],
        stages=list(stages),
    )


def write_dated_card(directory: Path, now: datetime) -> None:
    """Copy the model card next to the report, with the date, which the model itself never has."""
    path = directory / MODEL / MODEL_CARD
    if not path.is_file():  # such as a model of an earlier release
        return
    card = path.read_text(encoding="utf-8")
    (directory / DATED_CARD).write_text(f"{card.rstrip()}\n\nReported on {now:%Y-%m-%d}.\n", encoding="utf-8")


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
    answers = answers_sentence(card)
    return render_page(
        "data_card.html", card=card, class_totals=totals, quarantined=quarantined, answers=answers, made=made_at
    )
