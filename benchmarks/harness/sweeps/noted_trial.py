"""A trial whose process notes when it began, and how long its steps and evaluations took."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from slipstream.artifacts.results.ledger import EVALUATION, STEPS
from slipstream.artifacts.results.training import read_attempt
from slipstream.sweep.trial import TrialJob, train_trial

#: Names the file of the notes.
NOTES = "SWEEP_NOTES"


def noted_trial(link: Connection, job: TrialJob) -> None:
    """:func:`train_trial`; the trial has to end by itself."""
    began = time.monotonic()
    train_trial(link, job)
    note = {"began": began, "working": working(job.directory)}
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(note) + "\n")


def working(model: Path) -> float:
    """Seconds of steps and evaluations in which a model was trained."""
    seconds = read_attempt(model).ledger.seconds
    return seconds[STEPS] + seconds[EVALUATION]
