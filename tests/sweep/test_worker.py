"""Trials that cannot continue, and trials on preempted machines."""

import os
import signal
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.config import RunConfig
from slipstream.pipeline.sweep.records import CurvePoint
from slipstream.pipeline.sweep.trial import TrialOutcome
from slipstream.pipeline.sweep.worker import SweepWorker
from tests.support.sweep_runs import CONFIG, SweepRun, check, trials_of


def config(**sweep: Any) -> RunConfig:
    return RunConfig.from_dict({**CONFIG, "sweep": {**CONFIG["sweep"], **sweep}})


def wait_for(what: Any, limit_s: float = 60) -> None:
    limit = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.prove
def test_a_trial_that_cannot_be_trained_fails_alone_with_its_reason(tmp_path: Path, prepared: Path) -> None:
    """Its losses are not finite, its model is larger than any memory, or its factory has a bug."""
    number = 8
    rate, hidden = "training.learning_rate", "model.arguments.hidden"
    space = {rate: {"choices": [1e30, 0.01]}, hidden: {"choices": [[8], [10**12], ["wide"]]}}
    run = SweepRun(tmp_path, prepared, config(space=space, trials=number, sampler="random"), slots=2)
    run.start("one")
    trials = run.finish()
    failed = {t.number: t.ended.reason for t in trials if t.ended and t.ended.state == "failed"}
    too_large = {t.number for t in trials if t.values.get(hidden) == [10**12]}
    bugs = {t.number for t in trials if t.values.get(hidden) == ["wide"]}
    not_finite = {t.number for t in trials if t.values.get(rate) == 1e30} - too_large - bugs
    assert set(failed) == too_large | bugs | not_finite and len(failed) < number
    assert too_large and bugs and not_finite
    for failing, reason in failed.items():
        said = "memory" if failing in too_large else "TypeError" if failing in bugs else "non-finite"
        assert said in reason and said in (tmp_path / f"store/trials/{failing:04d}/log.txt").read_text()
    assert not list((tmp_path / "store/trials").glob("*/checkpoints/step-*"))


def test_a_trial_that_runs_out_of_memory_twice_with_one_number_has_failed() -> None:
    numbers, followed = iter((1, 2, 2, 4)), list[int]()

    def follow(*_: object) -> tuple[TrialOutcome, list[CurvePoint]]:
        followed.append(next(numbers))
        return TrialOutcome("out of memory", "rank 0 ran out of memory", micro_batches=followed[-1]), []

    worker: Any = SimpleNamespace(_follow=follow, _over=Event())
    taken: Any = SimpleNamespace(trial=SimpleNamespace(number=0), lost=False)
    job: Any = None
    outcome, _ = SweepWorker._follow_until_it_fits(worker, taken, job)
    assert outcome and (outcome.state, outcome.reason) == ("failed", "rank 0 ran out of memory")
    assert followed == [1, 2, 2]


@pytest.mark.prove
def test_a_machine_that_is_taken_away_loses_nothing(tmp_path: Path, prepared: Path) -> None:
    run = SweepRun(tmp_path, prepared, config(trials=2, pruning="none"))
    run.start("one")
    wait_for(lambda: list((tmp_path / "store/trials/0000/checkpoints").glob("step-*/manifest.json")))
    run.workers["one"].terminate()
    assert run.workers["one"].wait(30) == 1
    assert "this machine is about to be preempted" in run.said()
    run.start("one")
    trials = run.finish()
    check(run, trials, {})
    assert not trials[0].deaths and len(list((tmp_path / "store/trials/0000/claims").iterdir())) == 2


@pytest.mark.prove
def test_a_killed_sweep_is_gone_on_with_by_other_workers(tmp_path: Path, prepared: Path) -> None:
    run = SweepRun(tmp_path, prepared, config(trials=4, pruning="none"))
    run.start("one")
    wait_for(lambda: list((tmp_path / "store/trials/0000/checkpoints").glob("step-*/manifest.json")))
    run.kill("worker", "one")
    del run.workers["one"]
    for name in ("two", "three", "four"):
        run.start(name)
    trials = run.finish()
    check(run, trials, {})
    assert len(list((tmp_path / "store/trials/0000/claims").iterdir())) == 2


@pytest.mark.prove
def test_a_process_that_is_killed_again_and_again_fails_its_trial(tmp_path: Path, prepared: Path) -> None:
    run = SweepRun(tmp_path, prepared, config(trials=2))
    run.start("one")
    worker = run.workers["one"].pid
    killed: set[int] = set()
    for _ in range(3):
        wait_for(lambda: set(trials_of(worker)) - killed)
        (process,) = set(trials_of(worker)) - killed
        os.kill(process, signal.SIGKILL)
        killed.add(process)
    trials = run.finish()
    ended = trials[0].ended
    assert ended and ended.state == "failed" and len(trials[0].deaths) == 3
    assert ended.reason == "its process ended 3 times after step 0 without an error message, the last time with SIGKILL"
    assert trials[1].ended and trials[1].ended.state == "complete"


@pytest.mark.prove
def test_when_all_fail_from_the_start_the_sweep_ends(tmp_path: Path, prepared: Path) -> None:
    """Trial 0 among them: the rate as given is no better than those of the space."""
    given = {**CONFIG, "training": {**CONFIG["training"], "learning_rate": 1e30}}
    space = {"training.learning_rate": {"choices": [1e30, 1e31]}}
    sweep = {**CONFIG["sweep"], "space": space, "trials": 20}
    run = SweepRun(tmp_path, prepared, RunConfig.from_dict({**given, "sweep": sweep}))
    run.start("one")
    assert run.workers["one"].wait(120) == 1
    assert "sweep: the first 5 trials failed; trial 0: training.learning_rate: " in run.said()
    assert len(list((tmp_path / "store/trials").iterdir())) == 5
