"""The report as Flyte tasks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from flytekit import Deck, FlyteContextManager, current_context, task

from tasks.artifacts.compression import Compression
from tasks.artifacts.promotion import Promotion
from tasks.config import RunConfig
from tasks.flyte.metadata import WITH_DECK, on
from tasks.flyte.stage import (
    ArtifactDirectory,
    MadeByElement,
    StageRun,
    local_path,
    map_errors,
    rows_path,
    runs_locally,
)
from tasks.report.summary import (
    CompressionSummary,
    DataSummary,
    ExportSummary,
    NetworkSummary,
    RunSummary,
    TuningSummary,
)
from tasks.settings import to_dict

RUNS = Path("runs")


@task(**WITH_DECK, **on("report"))
@map_errors
def report(
    prepared: ArtifactDirectory,
    trained: ArtifactDirectory,
    evaluated: ArtifactDirectory,
    exported: ArtifactDirectory,
    networks: list[MadeByElement | None],
    stages: list[StageRun],
    compression: Compression | None,
    config: RunConfig,
    data: str,
    target: str,
    cron: str,
    kickoff: datetime | None,
    promotion: Promotion | None,
) -> RunSummary:
    """Put the page, the figures and the model into a directory of this run. Never cached: every run has its own.

    ``networks`` holds one benchmark of the interconnect, ``None`` if it failed; ``compression`` is ``None`` if the
    trained network was not to become smaller. The schedule ``cron`` started the run
    for ``kickoff``; "" and ``None`` if none did. ``promotion`` is ``None`` if the model was not to go into service.
    """
    from tasks.report.engine import build
    from tasks.report.figures import StageFigures
    from tasks.report.night import night_figures
    from tasks.report.stage_results import Results

    local = runs_locally()
    runs = RUNS if local else Path(current_context().working_directory) / RUNS
    measured = [network for network in networks if network]
    made = (local_path(each) for each in (trained, evaluated, exported))
    profiles = [local_path(network.artifact) for network in measured]
    results = Results.open(rows_path(prepared), *made, *profiles)
    smaller = [StageRun("compress", compression.seconds, compression.reused)] if compression else []
    # In the order in which they ran: what makes the network smaller after preparation and training.
    runs_of_stages = [*stages[:2], *smaller, *stages[2:], *(network.run for network in measured)]
    figures = [StageFigures(stage.name, stage.seconds, stage.reused) for stage in runs_of_stages]
    inputs = {"inputs": {"data": data, "target": target}, **to_dict(config)}
    night = night_figures(cron, kickoff, datetime.now(UTC)) if kickoff else None
    summary = build(runs, results, figures, inputs, night, promotion, compression)
    Deck("Report", Path(summary.directory, summary.report).read_text(encoding="utf-8"))
    return summary if local else replace(summary, directory=uploaded(summary.directory))


@task(**WITH_DECK, **on("report"))
@map_errors
def report_data(prepared: ArtifactDirectory, stages: list[StageRun]) -> DataSummary:
    """Put the data card and the prepared data into a directory of this run. Never cached, as :func:`report`."""
    from tasks.artifacts.prepared import PreparedData
    from tasks.report.data_engine import build_data
    from tasks.report.figures import StageFigures

    local = runs_locally()
    runs = RUNS if local else Path(current_context().working_directory) / RUNS
    figures = [StageFigures(stage.name, stage.seconds, stage.reused) for stage in stages]
    address = "" if local else str(prepared.remote_source)
    summary = build_data(runs, PreparedData.open(rows_path(prepared)), figures, address)
    Deck("Data", Path(summary.directory, summary.card).read_text(encoding="utf-8"))
    return summary if local else replace(summary, directory=uploaded(summary.directory))


@task(**WITH_DECK, **on("report"))
@map_errors
def report_export(exported: ArtifactDirectory, stages: list[StageRun]) -> ExportSummary:
    """Put the page and the model into a directory of this run. Never cached, as :func:`report`."""
    from tasks.report.engine import build_export
    from tasks.report.figures import StageFigures

    local = runs_locally()
    runs = RUNS if local else Path(current_context().working_directory) / RUNS
    figures = [StageFigures(stage.name, stage.seconds, stage.reused) for stage in stages]
    summary = build_export(runs, local_path(exported), figures)
    Deck("Export", Path(summary.directory, summary.report).read_text(encoding="utf-8"))
    return summary if local else replace(summary, directory=uploaded(summary.directory))


@task(**WITH_DECK, **on("report"))
@map_errors
def report_compression(compression: Compression) -> CompressionSummary:
    """The report of a network that was to become smaller: what was tried, what was taken, and where it lies."""
    found = CompressionSummary(compression)
    Deck("Compression", f"<pre>{escape(str(found))}</pre>")
    return found


@task(**WITH_DECK, **on("report"))
@map_errors
def report_network(network: MadeByElement) -> NetworkSummary:
    """Put a network profile and its page into a directory of this run. Never cached, as :func:`report`."""
    from tasks.report.network_engine import build_network

    local = runs_locally()
    runs = RUNS if local else Path(current_context().working_directory) / RUNS
    summary = build_network(runs, local_path(network.artifact))
    Deck("Network", Path(summary.directory, summary.page).read_text(encoding="utf-8"))
    return summary if local else replace(summary, directory=uploaded(summary.directory))


@task(**WITH_DECK, **on("report"))
@map_errors
def report_tuning(tuned: MadeByElement) -> TuningSummary:
    """Put the tuner's result and its page into a directory of this run. Never cached, as :func:`report`."""
    from tasks.report.network_engine import build_tuning

    local = runs_locally()
    runs = RUNS if local else Path(current_context().working_directory) / RUNS
    summary = build_tuning(runs, local_path(tuned.artifact))
    Deck("Tuning", Path(summary.directory, summary.page).read_text(encoding="utf-8"))
    return summary if local else replace(summary, directory=uploaded(summary.directory))


def uploaded(directory: str) -> str:
    """The URI of a copy that stays: a pod's disk goes with the pod."""
    return FlyteContextManager.current_context().file_access.put_raw_data(directory)
