"""A trial of a sweep whose process notes when it began and ended, in the file that ``SWEEP_NOTES`` names."""

import os
import time
from pathlib import Path
from typing import Any

from slipstream.pipeline.sweep.trial import train_trial


def noted(link: Any, job: Any) -> None:
    """:func:`train_trial`, which notes trial, process and time."""
    note(job.home, "began")
    train_trial(link, job)
    note(job.home, "ended")


def note(home: str, what: str) -> None:
    with Path(os.environ["SWEEP_NOTES"]).open("a") as notes:
        notes.write(f"{home.split('/')[-2]} {os.getpid()} {time.monotonic()} {what}\n")
