"""Checks of a GPU that end badly."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence

from tests.support.gpu_proof.check import Figure, NotHere, Place


def dies(place: Place) -> Sequence[Figure]:
    print("the last thing that it says", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def hangs(place: Place) -> Sequence[Figure]:
    time.sleep(600)
    return []


def fails(place: Place) -> Sequence[Figure]:
    raise AssertionError("two\nlines")


def lacks(place: Place) -> Sequence[Figure]:
    raise NotHere("needs 2 GPUs")


def holds(place: Place) -> Sequence[Figure]:
    assert not list(place.directory.iterdir())
    # What was found before is there already.
    assert len(json.loads((place.kept / "gpu.json").read_text())["checks"]) == 2
    return [Figure("answer", 42.0, "things")]
