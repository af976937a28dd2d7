"""A killed run ends bit for bit like an undisturbed one."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.gpu.attempts import ALL_RANKS, InjectedFault, TrainingJob, result_digests, run_attempt
from tests.support.fault_schedule import (
    DAMAGE,
    MOMENTS,
    RESUMING,
    disturbed,
    flip_shard,
    mislead,
    newest,
)

Undisturbed = Callable[[int], dict[str, str]]


def job_of(prepared: Path, place: Path, world: int) -> TrainingJob:
    return TrainingJob(prepared, place, world, str(place / "home"))


QUICK_DAMAGE = (flip_shard,)


def name_of(fault: InjectedFault) -> str:
    return f"{fault.where}-{fault.what}-{'all' if fault.rank == ALL_RANKS else fault.rank}-{fault.at}"


#: After the first step and later; a naive resume regroups DDP's buckets and differs from three ranks on.
@pytest.mark.parametrize(
    ("world", "steps"), [(2, (6,)), *(pytest.param(world, (2, 6), marks=pytest.mark.prove) for world in (2, 3, 4))]
)
def test_killed_at_any_step_it_ends_the_same(
    world: int, steps: tuple[int, ...], prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = job_of(prepared, tmp_path, world)
    for at in steps:
        killed = run_attempt(job, InjectedFault("step", rank=world - 1, at=at))
        assert killed.fired == 1 and not killed.finished
    assert run_attempt(job).finished
    assert result_digests(job) == undisturbed(world)


@pytest.mark.prove
@pytest.mark.parametrize(
    "more",
    [{"factory": "tests.support.nets:batch_norm"}, {"ema": 0.9}],
    ids=["batch_norm", "ema"],
)
def test_batch_statistics_and_averaged_weights_resume_too(more: dict[str, Any], prepared: Path, tmp_path: Path) -> None:
    whole, killed = (dataclasses.replace(job_of(prepared, tmp_path / name, 2), **more) for name in ("whole", "killed"))
    assert run_attempt(whole).finished
    assert run_attempt(killed, InjectedFault("step", rank=0, at=8)).fired == 1
    assert run_attempt(killed).finished
    assert result_digests(killed) == result_digests(whole)


@pytest.mark.parametrize("fault", [*MOMENTS, *RESUMING], ids=name_of)
@pytest.mark.prove
def test_killed_at_any_moment_it_ends_the_same(
    fault: InjectedFault, prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = job_of(prepared, tmp_path, 2)
    if fault in RESUMING:
        assert run_attempt(job, InjectedFault("step", rank=0, at=8)).fired == 1
    killed = run_attempt(job, fault)
    assert killed.fired == (2 if fault.rank == ALL_RANKS else 1)
    assert not killed.finished
    assert run_attempt(job).finished
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
@pytest.mark.parametrize(
    "damage",
    [pytest.param(damage, marks=[] if damage in QUICK_DAMAGE else pytest.mark.prove) for damage in DAMAGE],
    ids=lambda damage: damage.__name__,
)
def test_damage_is_passed_over(
    damage: Callable[[Path], None], prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = job_of(prepared, tmp_path, 2)
    assert run_attempt(job, InjectedFault("step", rank=0, at=12)).fired == 1
    step = int(newest(Path(job.home)).name[5:17])
    damage(Path(job.home))
    assert run_attempt(job).finished
    log = (tmp_path / "log-0").read_text()
    # The pointer is only for people: a wrong one costs nothing. Everything else costs one checkpoint.
    damaged = damage is not mislead
    assert ("is damaged" in log) == damaged
    assert f"resumes from step {step - job.checkpoint_every if damaged else step} " in log
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
def test_a_rank_that_stops_answering_is_given_up(prepared: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    job = job_of(prepared, tmp_path, 2)
    stopped = run_attempt(job, InjectedFault("step", what="SIGSTOP", rank=1, at=5))
    assert stopped.fired == 1 and not stopped.finished
    assert run_attempt(job).finished
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
def test_a_full_disk_costs_one_checkpoint_and_no_state(
    prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = job_of(prepared, tmp_path, 2)
    filled = run_attempt(job, InjectedFault("write", what="ENOSPC", rank=1, at=2))
    assert filled.fired == 1 and filled.finished
    assert "no space left" in (tmp_path / "log-0").read_text()
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_faults_changes_nothing(
    world: int, prepared: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Seeded schedules, several faults to a run: 5 runs of 6 faults at each of three worlds, 90 in all."""
    happened: Counter[str] = Counter()
    for run in range(5):
        job = job_of(prepared, tmp_path / str(run), world)
        happened.update(disturbed(job, seed=1000 * world + run, faults=6))
        assert result_digests(job) == undisturbed(world), f"run {run}: {happened}"
    assert happened.total() == 30
    assert all(any(what in name for name in happened) for what in ("SIGKILL", "SIGSTOP", "ENOSPC")), happened
    print(f"\n{world} ranks: {dict(happened.most_common())}")
