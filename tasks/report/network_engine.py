"""Writes the directory of a run that only measures the interconnect."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from tasks.artifacts.format import Artifact
from tasks.artifacts.network_profile import CSV, FILE, KIND, TABLE
from tasks.report.pages.network_charts import drawn
from tasks.report.pages.rendering import render
from tasks.report.run_directory import new_run
from tasks.report.stage_results import NetworkResults
from tasks.report.summary import NetworkSummary

PAGE = "network.html"


def build_network(runs: Path, network: Path) -> NetworkSummary:
    """Write a directory under ``runs`` with the page, the profile with all raw times and the table as CSV. Raises
    ``DamagedArtifact`` if the profile is not what was written."""
    artifact, results = Artifact.open(network, KIND), NetworkResults.open(network)
    table = artifact.read_bytes(TABLE).decode()

    def fill(directory: Path, now: datetime) -> None:
        for name in (FILE, CSV):
            (directory / name).write_bytes(artifact.read_bytes(name))
        charts = drawn(results.profile, results.course, results.model)
        page = render("network_page.html", profile=results.profile, charts=charts, table=table, made=now)
        (directory / PAGE).write_text(page, encoding="utf-8")

    directory = new_run(runs, fill)
    return NetworkSummary(str(directory), PAGE, FILE, table)
