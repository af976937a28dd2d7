"""Sweeps of real workers that can be killed, and the expected weights of every trial."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.config import RunConfig
from slipstream.operations.proofs.processes import FORK
from slipstream.pipeline.sweep.records import TrialHistory
from slipstream.pipeline.sweep.space import searched_parameters, trial_config
from slipstream.pipeline.sweep.store import SweepStore
from slipstream.pipeline.sweep.trial import WEIGHTS
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.results.training import KIND
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.settings import to_dict
from tests.support.processes import workers_of

CONFIG: dict[str, Any] = {
    "training": {"epochs": 12, "batch_size": 8, "checkpoint_every": 20},
    "model": {"arguments": {"hidden": [16], "dropout": 0.2}},
    "sweep": {
        "trials": 6,
        "space": {
            "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
            "model.arguments.hidden": {"choices": [[8], [16, 16]]},
        },
    },
}
#: The longest that a sweep of the tests may take.
LIMIT_S = 240


@dataclass
class SweepRun:
    """A sweep in a directory, with the workers that are at work on it."""

    place: Path
    prepared: Path
    config: RunConfig
    store: str = ""
    slots: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    #: What each worker was killed by, in order.
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        self.store = self.store or str(self.place / "store")
        (self.place / "run.json").write_text(json.dumps(to_dict(self.config)))

    def start(self, name: str, fault: str = "") -> None:
        command = [sys.executable, "-m", "tests.support.sweep_worker", str(self.place / "run.json")]
        command += [str(self.prepared), self.store, name, str(self.slots), *([fault] if fault else [])]
        notes = {"SWEEP_NOTES": str(self.place / "notes"), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment = {**os.environ, **notes, **self.environment}
        with (self.place / f"{name}.log").open("ab") as log:
            self.workers[name] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, what: str, name: str) -> bool:
        """Kill a worker, the process of one of its trials, or all workers. Returns whether there was one to kill."""
        if what == "slot":
            found = trials_of(self.workers[name].pid)
            if not found:
                return False
            os.kill(found[0], signal.SIGKILL)
        else:
            names = list(self.workers) if what == "all" else [name]
            for each in names:
                self.workers[each].kill()
            for each in names:
                self.workers[each].wait()
        self.killed.append(what)
        return True

    def kill_at_a_write(self, name: str, fault: str) -> bool:
        """Start a worker again so that it kills itself at one of its next writes. Returns whether it did."""
        self.workers[name].kill()
        self.workers[name].wait()
        self.start(name, fault)
        limit = time.monotonic() + 20
        while self.workers[name].poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        done = self.workers[name].poll() == -signal.SIGKILL
        self.killed += [f"write: {fault}"] if done else []
        return done

    def ended(self) -> dict[str, int | None]:
        return {name: worker.poll() for name, worker in self.workers.items()}

    def restart_the_dead(self) -> None:
        for name, code in self.ended().items():
            if code is not None and code < 0:
                self.start(name)

    def finish(self) -> list[TrialHistory]:
        """Let the workers end, starting those again that were killed. Returns the trials."""
        limit = time.monotonic() + LIMIT_S
        while any(code != 0 for code in self.ended().values()):
            assert time.monotonic() < limit, self.said()
            failed = {name: code for name, code in self.ended().items() if code and code > 0}
            assert not failed, (failed, self.said())
            self.restart_the_dead()
            time.sleep(0.1)
        return SweepStore(self.store, searched_parameters(self.config)).trials()

    def said(self) -> str:
        return "".join(path.read_text()[-3000:] for path in sorted(self.place.glob("*.log")))

    def overlaps(self) -> list[str]:
        """Return the trials that two processes ran at the same time."""
        lines = [line.split() for line in (self.place / "notes").read_text().splitlines()]
        began = [(float(at), trial, pid) for trial, pid, at, what in lines if what == "began"]
        ended = {pid: float(at) for trial, pid, at, what in lines if what == "ended"}
        found = []
        for at, trial, pid in began:
            others = [each for when, each, other in began if each == trial and other != pid and when < at]
            lives = [o for when, each, o in began if each == trial and o != pid and when < at and ended.get(o, 0) > at]
            found += [trial] if others and lives else []
        return found


def trials_of(worker: int) -> list[int]:
    """The processes of trials of a worker: forked from its fork server, which its command line names."""
    return [trial for server in workers_of(worker, b"forkserver") for trial in workers_of(server, b"forkserver")]


def alone(prepared: Path, config: RunConfig, trial: TrialHistory, place: Path, threads: int = 1) -> str:
    """The SHA-256 of the weights that the training of a trial ends with by itself, without a sweep."""
    run = trial_config(config, trial.values)
    place.mkdir(parents=True, exist_ok=True)
    (place / "run.json").write_text(json.dumps(to_dict(run)))
    process = FORK.Process(target=train_alone, args=(prepared, place, threads))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return Artifact.open(place / "model", KIND).files[WEIGHTS].sha256


def train_alone(prepared: Path, place: Path, threads: int) -> None:
    import torch

    from slipstream.pipeline.train.command import main

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    torch.set_num_threads(threads)
    main.main([str(prepared), str(place / "model"), str(place / "run.json")], standalone_mode=False)


def check(run: SweepRun, trials: Sequence[TrialHistory], known: dict[str, str]) -> None:
    """What has to hold of a finished sweep, whatever was killed: no trial is lost, none was run twice at once, and each
    complete one has the weights of its training alone. ``known`` are those by settings."""
    config = run.config
    assert [trial.number for trial in trials] == list(range(config.sweep.trials))
    assert all(trial.ended for trial in trials), run.said()
    assert not [trial.ended.reason for trial in trials if trial.ended and trial.ended.state == "failed"]
    assert not run.overlaps()
    of = partial(alone, run.prepared, config)
    for trial in trials:
        assert trial.ended
        if trial.ended.state == "complete":
            settings = json.dumps(trial.values, sort_keys=True)
            if settings not in known:
                known[settings] = of(trial, run.place / f"alone-{trial.number}")
            assert trial.ended.weights == known[settings], f"trial {trial.number}"
    assert any(trial.ended.state == "complete" for trial in trials if trial.ended)


KINDS = ("slot", "worker", "all", "write")


def storm(run: SweepRun, workers: int, kinds: Sequence[str], seed: int) -> list[TrialHistory]:
    """Run a sweep and kill its workers one after another in the given ways; a seed decides which and when.

    The sweep may end before all kills.
    """
    draws = random.Random(seed)
    for number in range(workers):
        run.start(f"worker-{number}")
    limit, left = time.monotonic() + LIMIT_S, list(kinds)
    while left:
        assert time.monotonic() < limit, run.said()
        time.sleep(draws.uniform(0.3, 2.0))
        run.restart_the_dead()
        alive = [name for name, code in run.ended().items() if code is None]
        if not alive:
            break
        name = draws.choice(alive)
        if left[0] == "write":
            method, moment = draws.choice(["create", "put"]), draws.choice(["before", "after"])
            done = run.kill_at_a_write(name, f"{method} {draws.randint(1, 6)} {moment}")
        else:
            done = run.kill(left[0], name)
        if done:
            left.pop(0)
    return run.finish()
