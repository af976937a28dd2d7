"""Flyte tasks of the report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TypeVar

from flytekit import Deck, FlyteContextManager, current_context, task

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import Evaluated, Exported, MadeByElement, Prepared, Trained
from slipstream.flyte.metadata import WITH_DECK, stage_metadata
from slipstream.flyte.stage import local_path, map_errors, rows_path, runs_locally
from slipstream.pipeline.report.run_directory import RunOrigin
from slipstream.pipeline.report.summary import (
    CompressionSummary,
    DataSummary,
    ExportSummary,
    NetworkSummary,
    RunSummary,
    TuningSummary,
)
from slipstream.shared.artifacts.results.compression import Compression
from slipstream.shared.artifacts.results.scoring import Promotion
from slipstream.shared.artifacts.results.sweep import Sweep
from slipstream.shared.artifacts.workspaces import STORE, ArtifactStore
from slipstream.shared.settings import as_written, differences
from slipstream.shared.source.dates import dated_address
from slipstream.shared.stages import StageRun

RUNS = Path("runs")
Summary = TypeVar("Summary", RunSummary, DataSummary, ExportSummary, NetworkSummary, TuningSummary)


@task(**WITH_DECK, **stage_metadata("report"))
@map_errors
def report(  # noqa: PLR0913 - a Flyte task: its inputs are values of the workflow, which go in one by one
    prepared: Prepared,
    trained: Trained,
    evaluated: Evaluated,
    exported: Exported,
    networks: list[MadeByElement | None],
    stages: list[StageRun],
    compression: Compression | None,
    config: RunConfig,
    data: str,
    target: str,
    cron: str,
    kickoff: datetime | None,
    promotion: Promotion | None,
    sweep: Sweep | None,
) -> RunSummary:
    """Write the report, its figures and the model into a new directory. Never cached: every run has its own.

    ``networks`` holds the interconnect benchmark, ``None`` if it failed. ``compression``, ``promotion`` and ``sweep``
    are ``None`` if the run had no such stage. A scheduled run has the schedule ``cron`` and the time ``kickoff``.
    """
    from slipstream.pipeline.report.engine import build_report
    from slipstream.pipeline.report.figures import schedule_figures
    from slipstream.pipeline.report.stage_results import StageResults
    from slipstream.pipeline.report.tracking import track_run

    measured = [network for network in networks if network]
    made = (local_path(each) for each in (trained, evaluated, exported))
    profiles = [local_path(network.artifact) for network in measured]
    results = StageResults.open(rows_path(prepared), *made, *profiles)
    smaller = [StageRun("compress", compression.seconds, compression.reused)] if compression else []
    searched = [StageRun("sweep", sweep.seconds, reused=False)] if sweep else []
    # In the order of execution: the sweep runs between preparation and training, the compression after training.
    runs_of_stages = [stages[0], *searched, stages[1], *smaller, *stages[2:], *(network.run for network in measured)]
    origin = origin_of({"data": dated_address("data", data, kickoff), "target": target}, config)
    inputs = {"inputs": origin.inputs, **origin.settings}
    schedule = schedule_figures(cron, kickoff, datetime.now(UTC)) if kickoff else None
    local = runs_locally()
    store = ArtifactStore(STORE) if local else None
    given = (results, runs_of_stages, inputs, schedule, promotion, compression, store, sweep, origin)
    summary = build_report(runs_here(), *given, links=local)
    track_run(summary, results.history, origin)
    return show_deck(summary, "Report", summary.report)


@task(**WITH_DECK, **stage_metadata("report"))
@map_errors
def report_data(prepared: Prepared, stages: list[StageRun]) -> DataSummary:
    """Write the data card and the prepared data into a new directory of this run. Never cached."""
    from slipstream.pipeline.report.engine import build_data
    from slipstream.shared.artifacts.prepared.data import PreparedData

    address = "" if runs_locally() else str(prepared.remote_source)
    summary = build_data(runs_here(), PreparedData.open(rows_path(prepared)), stages, address)
    return show_deck(summary, "Data", summary.card)


@task(**WITH_DECK, **stage_metadata("report"))
@map_errors
def report_export(exported: Exported, stages: list[StageRun]) -> ExportSummary:
    """Write the report and the exported model into a new directory of this run. Never cached."""
    from slipstream.pipeline.report.engine import build_export

    summary = build_export(runs_here(), local_path(exported), stages)
    return show_deck(summary, "Export", summary.report)


@task(**WITH_DECK, **stage_metadata("report"))
@map_errors
def report_compression(compression: Compression) -> CompressionSummary:
    """Show the result of a compression in the task's deck and return it."""
    found = CompressionSummary(compression)
    Deck("Compression", f"<pre>{escape(str(found))}</pre>")
    return found


@task(**WITH_DECK, **stage_metadata("report"))
@map_errors
def report_network(network: MadeByElement) -> NetworkSummary:
    """Write an interconnect profile and its page into a new directory of this run. Never cached."""
    from slipstream.pipeline.report.network_engine import build_network

    summary = build_network(runs_here(), local_path(network.artifact))
    return show_deck(summary, "Network", summary.page)


@task(**WITH_DECK, **stage_metadata("report"))
@map_errors
def report_tuning(tuned: MadeByElement) -> TuningSummary:
    """Write the tuner's result and its page into a new directory of this run. Never cached."""
    from slipstream.pipeline.report.network_engine import build_tuning

    summary = build_tuning(runs_here(), local_path(tuned.artifact))
    return show_deck(summary, "Tuning", summary.page)


def origin_of(inputs: dict[str, str], config: RunConfig) -> RunOrigin:
    from slipstream.pipeline.export.package.libraries import git_commit

    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if not runs_locally():
        command = current_context().execution_id.name
    settings = as_written(config)
    return RunOrigin(command, git_commit(), inputs, differences(settings, as_written(RunConfig())), settings)


def runs_here() -> Path:
    """Return the parent directory of all runs' directories: locally ``runs``, else on the pod's disk."""
    return RUNS if runs_locally() else Path(current_context().working_directory) / RUNS


def show_deck(summary: Summary, title: str, page: str) -> Summary:
    """Show the file ``page`` as the task's deck and return the summary.

    A pod uploads the summary's directory, since its disk is lost with the pod.
    """
    Deck(title, Path(summary.directory, page).read_text(encoding="utf-8"))
    if runs_locally():
        return summary
    stays = FlyteContextManager.current_context().file_access.put_raw_data(summary.directory)
    return replace(summary, directory=stays)
