"""The publishing thread yields to the steps, and reports the time it needs without them."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from slipstream.pipeline.train.checkpoint.background import (
    NICENESS,
    lower_thread_priority,
    waited_for_processor_s,
    working_seconds,
)
from slipstream.pipeline.train.checkpoint.publish import Publisher
from tests.support.small_run import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_publishing_thread_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = Publisher.publish

    def noted(*arguments: object) -> object:
        seen.append(niceness())
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Publisher, "publish", noted)
    before = niceness()
    run = Run(tmp_path)
    run.steps(1)
    run.save(1)
    assert seen == [max(before, NICENESS)] and niceness() == before
    assert run.checkpoints.background.publish_seconds > 0


def test_a_thread_that_gives_way_waits_beside_others_and_knows_for_how_long() -> None:
    """Both on one processor: it gets a part of it, and the wait that it tells is the rest."""
    found: list[tuple[float, float]] = []
    one = {min(os.sched_getaffinity(0))}
    started, starts = os.pipe()
    rival = os.fork()
    if not rival:
        os.sched_setaffinity(0, one)
        os.write(starts, b"1")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            pass
        os._exit(0)

    def work() -> None:
        os.sched_setaffinity(threading.get_native_id(), one)
        lower_thread_priority()
        waited, begun, used = waited_for_processor_s(), time.perf_counter(), time.thread_time()
        while time.thread_time() - used < 0.02:
            pass
        found.append((time.perf_counter() - begun, waited_for_processor_s() - waited))

    try:
        os.read(started, 1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(25)
        assert not thread.is_alive()
    finally:
        os.kill(rival, 9)
        os.waitpid(rival, 0)
    took, waited = found[0]
    assert took > 0.1 and working_seconds([(took, waited)]) < took / 2


def test_what_ranks_need_is_without_the_longest_wait() -> None:
    assert working_seconds([(5.0, 1.0), (4.9, 3.0)]) == 2.0
    assert working_seconds([(1.0, 1.5)]) == 0.0
