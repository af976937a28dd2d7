"""``on_evaluation`` is called on rank 0 for every evaluation, and may stop the training on all ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt


def said(job: TrainingJob) -> list[str]:
    return (job.place / "told-0").read_text().splitlines()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.prove), 2])
def test_all_ranks_stop_where_rank_0_is_told_to(world: int, prepared: Path, tmp_path: Path) -> None:
    job = TrainingJob(prepared, tmp_path, world, str(tmp_path / "home"), stops_after=2)
    assert not run_attempt(job).finished
    assert [line.split()[:2] for line in said(job)] == [["1", "5"], ["2", "10"]]
    assert not (tmp_path / "told-1").exists() and not job.output.exists()
    # Once one has ended the other is killed, as by their agent, and need not have come to saying it.
    logs = [(tmp_path / f"log-{rank}").read_text() for rank in range(world)]
    assert any(log.endswith("Stopped: stopped at step 10\n") for log in logs), logs


@pytest.mark.prove
def test_a_training_that_nobody_stops_ends_as_without_anybody(
    prepared: Path, undisturbed: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    """Kills change nothing: every evaluation is reported before a checkpoint holds it, so none is missed."""
    job = TrainingJob(prepared, tmp_path / "told", 2, str(tmp_path / "told/home"), stops_after=99)
    killed = run_attempt(job, InjectedFault("step", at=14))
    assert killed.fired and not killed.finished and run_attempt(job).finished
    assert result_digests(job) == undisturbed(2)
    steps = [int(line.split()[1]) for line in said(job)]
    assert sorted(set(steps)) == [5, 10, 15, 20, 24] and len(set(said(job))) == 5


@pytest.mark.prove
def test_told_to_stop_at_the_end_it_has_ended(prepared: Path, tmp_path: Path) -> None:
    job = TrainingJob(prepared, tmp_path, 1, str(tmp_path / "home"), stops_after=5)
    assert run_attempt(job).finished and (job.output / "manifest.json").is_file()
