"""Overhead of a training besides its steps and evaluations: as a trial of a sweep, and by the Flyte task."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.links import REPOSITORY, SEARCH_PATH
from harness.sweeps.noted_trial import NOTES, working
from slipstream.operations.proofs.turns import Figures

#: Profile with one CPU per stage and one process for training.
PROFILE = '[default]\ncpu = "1"\nmemory = "2Gi"\n\n[distributed]\ncpu = "1"\nmemory = "4Gi"\nprocesses = 1\n'
STAGE = re.compile(r"StageRun\(name='train', seconds=([\d.]+)")


def training_of(epochs: int) -> dict[str, Any]:
    return {"epochs": epochs, "patience": 0}


def trials_of_a_worker(place: Path, prepared: Path, epochs: int, trials: int) -> list[Figures]:
    """Run a sweep of one worker and return the overhead in seconds of every trial but the last.

    ``besides`` is the time from a trial's start to the next trial's, less its steps and evaluations (``working``). The
    first trial also has ``first``, the seconds before its start.
    """
    place.mkdir()
    (place / "prepared").symlink_to(prepared)
    space = {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}}
    sweep = {"space": space, "trials": trials, "pruning": "none"}
    (place / "run.json").write_text(json.dumps({"training": training_of(epochs), "sweep": sweep}))
    began = time.monotonic()
    run([sys.executable, "-m", "harness.sweeps.one_worker", str(place)], place, {NOTES: str(place / "notes")})
    notes = [json.loads(line) for line in (place / "notes").read_text().splitlines()]
    assert len(notes) == trials, "a trial failed"
    found = [
        {"besides": after["began"] - note["began"] - note["working"], "working": note["working"]}
        for note, after in pairwise(notes)
    ]
    found[0]["first"] = notes[0]["began"] - began
    return found


def through_the_task(place: Path, prepared: Path, epochs: int) -> Figures:
    """Train by ``pyflyte run tasks/train.py train`` and return the overhead in seconds.

    ``besides`` is the command's time and ``stage`` the stage's own measurement, both less steps and evaluations.
    """
    place.mkdir()
    (place / "profile.toml").write_text(PROFILE)
    pyflyte = str(Path(sys.executable).with_name("pyflyte"))
    given = {"prepared": str(prepared), "model": "{}", "training": json.dumps(training_of(epochs)), "code": "as is"}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    began = time.monotonic()
    command = [pyflyte, "run", str(REPOSITORY / "tasks/train.py"), "train", *words]
    said = run(command, place, {"SLIPSTREAM_PROFILE": str(place / "profile.toml")})
    took, stage = time.monotonic() - began, STAGE.search(said)
    assert stage, said
    (attempt,) = place.glob(".slipstream/train/*/attempt.json")
    spent = working(attempt.parent)
    return {"besides": took - spent, "stage": float(stage[1]) - spent, "working": spent}


def run(command: list[str], place: Path, environment: Mapping[str, str]) -> str:
    """Run a command in a directory, with one thread for each process, and return its output."""
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": SEARCH_PATH}
    ended = subprocess.run(
        command, cwd=place, env={**os.environ, **threads, **environment}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
