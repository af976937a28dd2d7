"""Checks of a GPU that end badly."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence

from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure


def dies(place: CheckContext) -> Sequence[CheckFigure]:
    print("the last thing that it says", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def hangs(place: CheckContext) -> Sequence[CheckFigure]:
    time.sleep(600)
    return []


def fails(place: CheckContext) -> Sequence[CheckFigure]:
    raise AssertionError("two\nlines")


def lacks(place: CheckContext) -> Sequence[CheckFigure]:
    raise CannotRun("needs 2 GPUs")


def killed_half_way(place: CheckContext) -> Iterator[CheckFigure]:
    yield CheckFigure("measured before", 7.0, "ms")
    yield CheckFigure("and this", "too")
    os.kill(os.getpid(), signal.SIGKILL)
    yield CheckFigure("never", 1.0)


def answers(place: CheckContext) -> Sequence[CheckFigure]:
    return [CheckFigure("answer", 42.0, "things")]


def holds(place: CheckContext) -> Sequence[CheckFigure]:
    assert not list(place.directory.iterdir())
    # What was found before is there already.
    assert len(json.loads((place.kept / "gpu.json").read_text())["checks"]) == 2
    return [CheckFigure("answer", 42.0, "things")]
