"""Writer of the directory of a run that only measures or tunes the interconnect."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from slipstream.pipeline.report.pages.network_charts import gains, network_charts
from slipstream.pipeline.report.pages.rendering import render_page
from slipstream.pipeline.report.run_directory import new_run
from slipstream.pipeline.report.stage_results import NetworkResults
from slipstream.pipeline.report.summary import NetworkSummary, TuningSummary
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.interconnect import tuning as network_tuning
from slipstream.shared.interconnect.profile import CSV, FILE, KIND, TABLE

PAGE, TUNING_PAGE = "network.html", "tuning.html"


def build_network(runs: Path, network: Path) -> NetworkSummary:
    """Write a run directory under ``runs``: page, raw profile and CSV table.

    Raises ``DamagedArtifact`` if the profile is damaged.
    """
    artifact, results = Artifact.open(network, KIND), NetworkResults.open(network)
    table = artifact.read_bytes(TABLE).decode()

    def fill(directory: Path, now: datetime) -> None:
        for name in (FILE, CSV):
            (directory / name).write_bytes(artifact.read_bytes(name))
        charts = network_charts(results.profile, results.course, results.model)
        page = render_page("network_page.html", profile=results.profile, charts=charts, table=table, made=now)
        (directory / PAGE).write_text(page, encoding="utf-8")

    directory = new_run(runs, fill)
    return NetworkSummary(str(directory), PAGE, FILE, table)


def build_tuning(runs: Path, tuned: Path) -> TuningSummary:
    """Write a run directory under ``runs``: the tuning result and its page.

    Raises ``UserError`` if ``tuned`` does not hold a complete result.
    """
    tuning = network_tuning.read_tuning(tuned)

    def fill(directory: Path, now: datetime) -> None:
        (directory / network_tuning.FILE).write_bytes(Artifact.open(tuned, KIND).read_bytes(network_tuning.FILE))
        measured = [trial for trial in tuning.trials if trial.turns]
        chart = gains(measured) if measured else None
        page = render_page("tuning_page.html", tuning=tuning, chart=chart, made=now)
        (directory / TUNING_PAGE).write_text(page, encoding="utf-8")

    directory = new_run(runs, fill)
    return TuningSummary(str(directory), TUNING_PAGE, network_tuning.FILE, str(tuning))
