"""Sums of the goodput record; an attempt's file outlives its process."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from slipstream.operations.proofs.processes import FORK
from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory
from slipstream.pipeline.train.fault_tolerance import goodput
from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.shared.artifacts.results.ledger import (
    EVALUATION,
    KILLED,
    STALL,
    STEPS,
    AttemptRecord,
    read_attempts,
    summarise_goodput,
)
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed.child_processes import end_with_parent
from slipstream.shared.storage import storage_for
from tests.support.processes import running


def page(attempt: int, first: int, last: int, step_s: float = 0.5) -> AttemptRecord:
    made = AttemptRecord(attempt, 2, first, last, wall=(last - first) * step_s + 10)
    made.seconds[STEPS] = (last - first) * step_s
    return made


def test_steps_that_were_done_again_are_lost() -> None:
    # 0-100, back to 80; 80-130, back to 120; 120-200.
    found = summarise_goodput([page(3, 120, 200), page(1, 0, 100), page(2, 80, 130)])
    assert (found.executed, found.kept) == (100 + 50 + 80, 200)
    assert found.useful_steps == 200 / 230
    assert found.lost == pytest.approx(30 * 0.5)
    assert found.goodput == pytest.approx(200 * 0.5 / (230 * 0.5 + 30))


def test_an_attempt_that_falls_back_further_makes_more_than_its_predecessor_lose() -> None:
    # The newest checkpoint of attempt 2 was damaged: attempt 3 begins before attempt 2 did.
    found = summarise_goodput([page(1, 0, 100), page(2, 80, 130), page(3, 60, 200)])
    assert (found.executed, found.kept) == (290, 200)


def test_time_goes_to_its_account(tmp_path: Path) -> None:
    kept = GoodputRecorder(
        CheckpointDirectory(storage_for(str(tmp_path))), 1, 1, writes=False, started=time.perf_counter() - 5
    )
    with kept.time("restore"):
        time.sleep(0.05)
    kept.begin(10)
    kept.add(STEPS, 2.0)
    with pytest.raises(RuntimeError), kept.time(EVALUATION):
        time.sleep(0.02)
        raise RuntimeError
    kept.record.last_step = 14
    seconds = kept.summary().seconds
    # A busy machine wakes a process late, but the same time is not counted twice.
    assert 5 <= seconds["start"] < 6 and 0.05 <= seconds["restore"] < 1 and 0.02 <= seconds[EVALUATION] < 1
    assert sum(seconds.values()) - 2.0 <= time.perf_counter() - kept._started
    assert seconds[STALL] == 0
    assert kept.summary().executed == 4


def test_saves_are_counted_though_not_every_one_is_marked(tmp_path: Path) -> None:
    recorders = [
        GoodputRecorder(
            CheckpointDirectory(storage_for(str(tmp_path))), attempt, 1, writes=False, started=time.perf_counter()
        )
        for attempt in (1, 2)
    ]
    for recorder, saves in zip(recorders, (3 * goodput.MOST_EVENTS, 5), strict=True):
        for _ in range(saves):
            recorder.event(goodput.SAVED)
        recorder.event(goodput.EVALUATED)
    assert len(recorders[0].record.events[goodput.SAVED]) <= goodput.MOST_EVENTS
    assert summarise_goodput([each.record for each in recorders]).saves == 3 * goodput.MOST_EVENTS + 5


def write_until_killed(home: str) -> None:
    goodput.PERIOD_S = 0.02
    place = CheckpointDirectory(storage_for(home))
    kept = GoodputRecorder(place, place.claim(Holder()), 2, writes=True, started=time.perf_counter())
    kept.begin(0)
    for done in range(1, 51):
        kept.record.last_step = done
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_attempt_leaves_its_record_and_the_next_one_counts_it(tmp_path: Path) -> None:
    process = FORK.Process(target=write_until_killed, args=(str(tmp_path),), daemon=True)
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    storage = storage_for(str(tmp_path))
    home = CheckpointDirectory(storage)
    second = GoodputRecorder(home, home.claim(Holder()), 2, writes=True, started=time.perf_counter())
    second.begin(40)
    second.record.last_step = 100
    second.end("finished")
    found = summarise_goodput(read_attempts(storage))
    assert (found.executed, found.kept, found.ends) == (110, 100, (KILLED, "finished"))
    (tmp_path / "ledger/0003.json").write_text('{"attempt": 3')
    assert len(read_attempts(storage)) == 2


def agent(path: Path) -> None:
    worker = multiprocessing.get_context("fork").Process(target=work_on, args=(path, os.getpid()))
    worker.start()
    time.sleep(60)


def work_on(path: Path, parent: int) -> None:
    end_with_parent(parent)
    path.write_text(str(os.getpid()))
    time.sleep(60)


def test_a_worker_ends_with_its_agent(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    started = FORK.Process(target=agent, args=(path,))
    started.start()
    end = time.monotonic() + 10
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    worker = int(path.read_text())
    os.kill(started.pid or 0, signal.SIGKILL)
    started.join()
    while running(worker):
        assert time.monotonic() < end, "the worker outlived its agent"
        time.sleep(0.01)


def test_a_killed_attempts_stale_record_counts_up_to_where_the_next_went_on() -> None:
    stale = AttemptRecord(1, 2, first_step=0, last_step=3)
    found = summarise_goodput([stale, AttemptRecord(2, 2, first_step=10, last_step=20, ended="finished")])
    assert (found.executed, found.kept) == (20, 20)
    assert stale.last_step == 3, "the pages themselves are left alone"
