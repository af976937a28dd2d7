"""Sweep trial that records its start, and the seconds of its steps and evaluations."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from slipstream.pipeline.sweep.trial import TrialJob, train_trial
from slipstream.shared.artifacts.results.ledger import EVALUATION, STEPS
from slipstream.shared.artifacts.results.training import read_attempt

#: Environment variable with the path of the notes file.
NOTES = "SWEEP_NOTES"


def noted_trial(link: Connection, job: TrialJob) -> None:
    """Run :func:`train_trial` and append a note as a JSON line; a trial that is stopped writes none."""
    began = time.monotonic()
    train_trial(link, job)
    note = {"began": began, "working": working(job.directory)}
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(note) + "\n")


def working(model: Path) -> float:
    seconds = read_attempt(model).ledger.seconds
    return seconds[STEPS] + seconds[EVALUATION]
