"""Kills of any process of a sweep lose or repeat no trial, and every trial gives the weights of its training alone."""

import random
import time
from pathlib import Path

import pytest

from slipstream.config import RunConfig
from tests.support.faulty_s3 import FaultyS3
from tests.support.sweep_runs import CONFIG, KINDS, SweepRun, check, storm


@pytest.mark.prove
def test_two_workers_and_a_kill_of_each_kind(tmp_path: Path, prepared: Path) -> None:
    run = SweepRun(tmp_path, prepared, RunConfig.from_dict(CONFIG))
    trials = storm(run, 2, KINDS, seed=3)
    assert len(run.killed) == len(KINDS), run.killed
    check(run, trials, {})


@pytest.mark.prove
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_storm(workers: int, tmp_path: Path, prepared: Path) -> None:
    """Two sweeps of each number of workers and at least 14 kills in them: 42 over all."""
    known: dict[str, str] = {}
    kills = 0
    for seed in range(2):
        sweep = {"seed": seed, "trials": 6 + 6 * workers, "pruning": "none" if seed == 1 else "asha"}
        config = RunConfig.from_dict({**CONFIG, "sweep": {**CONFIG["sweep"], **sweep}})
        run = SweepRun(tmp_path / str(seed), prepared, config, slots=2 if workers == 1 else 1)
        kinds = random.Random(seed).choices([*KINDS, "slot"], k=9)
        trials = storm(run, workers, kinds, seed=100 * workers + seed)
        check(run, trials, known)
        kills += len(run.killed)
    assert kills >= 14


@pytest.mark.prove
def test_a_store_that_is_away_for_a_while_is_waited_for(tmp_path: Path, prepared: Path, store: FaultyS3) -> None:
    """S3 is unavailable during trials of two workers; one of them is killed meanwhile."""
    run = SweepRun(tmp_path, prepared, RunConfig.from_dict(CONFIG), store=f"s3://bucket/{tmp_path.name}")
    for name in ("one", "two"):
        run.start(name)
    for away in range(2):
        time.sleep(9)
        refused = store.refused
        store.down_until = time.monotonic() + 20
        if away:
            run.kill("worker", "one")
            run.restart_the_dead()
        time.sleep(20)
        assert store.refused > refused, "no request while it was unavailable"
    check(run, run.finish(), {})
