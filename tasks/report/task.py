"""The door of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flytekit import Deck, FlyteContextManager, current_context, task

from tasks.config import RunConfig
from tasks.hardware.on import on
from tasks.report.summary import RunSummary
from tasks.settings import to_dict
from tasks.stage import ArtifactDirectory, StageRun, local_path, runs_locally

RUNS = Path("runs")


@task(enable_deck=True, **on("report"))
def report(
    prepared: ArtifactDirectory,
    trained: ArtifactDirectory,
    evaluated: ArtifactDirectory,
    exported: ArtifactDirectory,
    network: ArtifactDirectory,
    stages: list[StageRun],
    config: RunConfig,
    data: str,
    target: str,
) -> RunSummary:
    """Put the page, the figures and the model into a directory of this run. Never cached: every run has its own."""
    from tasks.report.engine import build
    from tasks.report.results import Results
    from tasks.report.summary import StageFigures

    local = runs_locally()
    runs = RUNS if local else Path(current_context().working_directory) / RUNS
    results = Results.open(*(local_path(each) for each in (prepared, trained, evaluated, exported, network)))
    figures = [StageFigures(stage.name, stage.seconds, stage.reused) for stage in stages]
    summary = build(runs, results, figures, {"inputs": {"data": data, "target": target}, **to_dict(config)})
    Deck("Report", Path(summary.directory, summary.report).read_text(encoding="utf-8"))
    if local:
        return summary
    # A pod's disk goes with the pod.
    access = FlyteContextManager.current_context().file_access
    return replace(summary, directory=access.put_raw_data(summary.directory))
