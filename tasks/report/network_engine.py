"""Writes the directory of a run that only measures the interconnect."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from tasks.artifacts.format import Artifact
from tasks.artifacts.network_profile import COURSE, CSV, FILE, KIND, MODEL, TABLE, from_json
from tasks.report.pages.network_charts import drawn
from tasks.report.pages.rendering import render
from tasks.report.run_directory import new_run
from tasks.report.summary import NetworkSummary

PAGE = "network.html"


def build_network(runs: Path, network: Path) -> NetworkSummary:
    """Write a directory under ``runs`` with the page, the profile with all raw times and the table as CSV. Raises
    ``DamagedArtifact`` if the profile is not what was written."""
    artifact = Artifact.open(network, KIND)
    profile = from_json(artifact.read_json(FILE), str(artifact.path(FILE)))
    table = artifact.read_bytes(TABLE).decode()

    def fill(directory: Path, now: datetime) -> None:
        for name in (FILE, CSV):
            (directory / name).write_bytes(artifact.read_bytes(name))
        charts = drawn(profile, artifact.read_json(COURSE), artifact.read_json(MODEL))
        page = render("network_page.html", profile=profile, charts=charts, table=table, made=now)
        (directory / PAGE).write_text(page, encoding="utf-8")

    directory = new_run(runs, fill)
    return NetworkSummary(str(directory), PAGE, FILE, table)
