"""The report as a Flyte task, and its summary's way through Flyte."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import MadeByElement
from slipstream.pipeline.report.engine import run_summary
from slipstream.pipeline.report.summary import RunSummary
from slipstream.shared.stages import StageRun
from tasks.report import report
from tests.support.report_runs import INT8, STAGES, compression, results


def test_a_summary_survives_flyte(tmp_path: Path) -> None:
    summary = run_summary(results(tmp_path, ["no", "yes"]), STAGES, "runs/now")
    first, *others = summary.export.variants
    missing = replace(first, bytes=None, metrics=None, latency_ms={}, largest_difference=None)
    assert summary.network
    unmeasured = replace(summary.network, all_reduce_latency_us=None, all_reduce_busbw_bytes=None)
    exported = replace(summary.export, variants=[missing, *others])
    summary = replace(summary, export=exported, network=unmeasured, compression=compression())
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, summary, RunSummary, TypeEngine.to_literal_type(RunSummary))
    again = TypeEngine.to_python_value(context, literal, RunSummary)
    assert again == summary
    assert str(again) == str(summary)


def run_task(directory: Path, *, measured: bool = True, cron: str = "", kickoff: datetime | None = None) -> RunSummary:
    results(directory / "in", list("0123456789"))
    artifacts = {
        argument: FlyteDirectory(str(directory / "in" / kind))
        for argument, kind in {
            "prepared": "prepare",
            "trained": "train",
            "evaluated": "evaluate",
            "exported": "export",
        }.items()
    }
    stages = [StageRun("prepare", 0.0, True), StageRun("train", 31.24, False)]
    run = StageRun("collectives", 2.0, False)
    network = MadeByElement(FlyteDirectory(str(directory / "in/collectives")), run) if measured else None
    inputs = {"config": RunConfig(), "data": "", "target": "digit"}
    also = {"compression": None, "promotion": None, "sweep": None}
    return report(**artifacts, networks=[network], stages=stages, **inputs, cron=cron, kickoff=kickoff, **also)


def test_the_task_writes_into_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary = run_task(tmp_path)
    assert summary.directory.startswith("runs/")
    assert (tmp_path / summary.directory / summary.report).exists()
    stages = [(stage.name, stage.reused) for stage in summary.stages]
    assert stages == [("prepare", True), ("train", False), ("collectives", False)]
    assert (tmp_path / summary.directory / summary.model_file).exists()


def test_a_benchmark_that_failed_costs_its_own_figures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary = run_task(tmp_path, measured=False)
    assert summary.network is None and [stage.name for stage in summary.stages] == ["prepare", "train"]
    assert "Network     not measured: the benchmark of the collectives failed" in str(summary)
    page = (tmp_path / summary.directory / summary.report).read_text(encoding="utf-8")
    assert "Not measured: the benchmark of the collectives failed." in page and "Bus bandwidth" not in page


def test_a_run_that_a_schedule_started_names_the_runs_that_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    schedule = run_task(tmp_path, cron="0 0 * * *", kickoff=today - timedelta(days=2)).schedule
    assert schedule and schedule.skipped[:2] == [f"{today - timedelta(days=days):%Y-%m-%d} 00:00" for days in (1, 0)]
    assert run_task(tmp_path / "by hand").schedule is None


def test_a_pod_uploads_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tasks.report.runs_locally", lambda: False)
    summary = run_task(tmp_path)
    raw_outputs = FlyteContextManager.current_context().file_access.raw_output_prefix
    assert summary.directory.startswith(raw_outputs)
    assert Path(summary.directory, summary.report).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert Path(summary.directory, summary.model_file).read_bytes() == INT8
    assert not (tmp_path / "runs").exists()


def test_every_report_is_made_anew() -> None:
    assert not report.metadata.cache


def test_a_deck_is_the_tasks_own_alone() -> None:
    """flytekit's deck of dependencies would run pip in the pod, which asks the network for a newer pip."""
    assert not report.disable_deck and not report.deck_fields
