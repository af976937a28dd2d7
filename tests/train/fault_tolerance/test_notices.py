"""Preemption notices are received during all work of a run, and cost no work if there was time to save."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt

Undisturbed = Callable[[int], dict[str, str]]


def job_of(prepared: Path, place: Path, world: int = 2) -> TrainingJob:
    return TrainingJob(prepared, place, world, str(place / "home"))


def last_page(job: TrainingJob) -> dict[str, Any]:
    return json.loads(max(Path(job.home).glob("ledger/*.json")).read_bytes())


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 3])  # of three ranks one has a batch more
def test_during_an_evaluation_all_leave_it_and_the_next_attempt_makes_it_again(
    world: int, prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = job_of(prepared, tmp_path, world)
    told = run_attempt(job, InjectedFault("evaluation", what="SIGTERM", rank=0, at=2))
    assert told.fired == 1 and not told.finished
    page = last_page(job)
    assert page["ended"].startswith("stopped at step 10, saved (rank 0: signal: SIGTERM"), page
    assert page["last_step"] == page["saved_step"] == 10
    assert run_attempt(job).finished
    assert "resumes from step 10" in (tmp_path / "log-0").read_text()
    assert result_digests(job) == undisturbed(world)


@pytest.mark.prove
def test_during_a_restore_all_leave_before_the_first_step(
    prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = dataclasses.replace(job_of(prepared, tmp_path), patience_s=30)
    assert run_attempt(job, InjectedFault("step", rank=0, at=8)).fired == 1
    told = run_attempt(job, InjectedFault("restore", what="SIGTERM", rank=1))
    assert told.fired == 1 and not told.finished
    page = last_page(job)
    assert (
        page["ended"].startswith("stopped before the first step (rank 1")
        and page["last_step"] == page["first_step"] > 0
    )
    assert run_attempt(job).finished
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
def test_a_rank_whose_data_does_not_come_leaves_in_time(
    prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    # Its peer waits for it in a step that cannot end; without an escape both would until they are killed.
    job = dataclasses.replace(job_of(prepared, tmp_path), grace_s=3, patience_s=60)
    told = run_attempt(job, InjectedFault("data", what="SIGTERM", rank=0, at=9))
    assert told.fired == 1 and not told.finished and told.seconds < 30
    assert "stopped while waiting for data, with step " in last_page(job)["ended"]
    assert run_attempt(job).finished
    assert result_digests(job) == undisturbed(2)
