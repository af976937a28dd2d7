"""An unavailable store: training continues, one snapshot waits, and the user is informed now and then."""

import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from slipstream.operations.proofs.gpu.attempts import TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train.checkpoint.background import SLOW_S, Outage
from slipstream.pipeline.train.checkpoint.home import CheckpointName
from slipstream.pipeline.train.checkpoint.shards import FileWriter
from slipstream.pipeline.train.fault_tolerance import guard as guards
from slipstream.pipeline.train.fault_tolerance.consensus import CheckpointInterval
from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
from slipstream.shared.storage import StorageUnavailable
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3
from tests.support.small_run import Run, names, same


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_warning_says_what_a_loss_would_cost_and_comes_again_when_that_has_doubled() -> None:
    clock = Clock()
    outage = Outage("s3://b/home", now=clock)
    outage.begin(100)
    outage.why = "the store did not answer"
    found = []
    for second in range(10, 601):
        clock.now = 1000.0 + second
        if warning := outage.warning(100 + 2 * second):
            found.append((second, warning))
    assert [second for second, _ in found] == [10, 20, 40, 80, 160, 320]
    assert found[2][1] == (
        "no checkpoint could be saved at s3://b/home for 40 s (the store did not answer): a failure now would cost 80 "
        "steps; training continues and retries"
    )
    assert outage.saved(900, taken=1590.0).startswith("checkpoint at step 900 saved at s3://b/home")
    assert outage.seconds == 10 and outage.saved(1000, taken=1600.0) == ""


def test_a_store_that_is_merely_slow_is_no_outage_for_a_minute() -> None:
    clock = Clock()
    outage = Outage("s3://b/home", now=clock)
    clock.now += SLOW_S - 1
    assert not outage.warning(7)
    clock.now += 1
    assert "no checkpoint could be saved at s3://b/home for 60 s: a failure now" in outage.warning(7)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A store that answers no save while ``away["store"]``, at once instead of after half a minute."""
    state = {"store": False}
    original = FileWriter.write

    def write(self: FileWriter, name: str, chunks: object) -> None:
        if state["store"]:
            raise StorageUnavailable("away")
        original(self, name, chunks)  # type: ignore[arg-type]

    monkeypatch.setattr(FileWriter, "write", write)
    return state


def seed_everything() -> None:
    random.seed(1)
    np.random.seed(1)


@pytest.mark.prove
def test_600_seconds_without_a_store_cost_no_step_and_one_snapshot(
    away: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step is a second of a simulated clock, and a save is due every tenth. The same weights as with the store."""
    seed_everything()
    whole = Run(tmp_path / "whole")
    whole.steps(700)
    seed_everything()
    run, clock = Run(tmp_path / "home"), Clock()
    background = run.checkpoints.background
    background.outage.now = clock
    with NoticeWatcher([], grace_s=None) as watcher:
        recorder = GoodputRecorder(run.checkpoints.home, 1, 1, writes=True, started=time.perf_counter())
        guard = Guard(run.checkpoints, CheckpointInterval(steps=10), watcher, recorder)
        run.checkpoints.prepare({"step": 0})
        guard.begin(0)
        buffers, most = run.checkpoints._buffers, 0
        for step in range(1, 701):
            clock.now += 1.0
            away["store"] = 50 < step <= 650
            start = guard.before_step()
            run.steps(1)
            guard.finished(step, guard.enqueued(start))
            guard.after_step(step, lambda step=step: ({"step": step}, None))  # type: ignore[misc]
            guard._exchange_and_publish(step, lambda: None)  # as every second
            assert run.checkpoints._buffers is buffers, "a second set of buffers"
            most = max(most, sum(1 for _ in (tmp_path / "home/.scratch").glob("checkpoint-*/step-*")))
        run.checkpoints.finish()
        guard.close()
    assert most <= 1, "more than one save lay on the disk"
    said = capsys.readouterr().err
    seconds = [int(found) for found in re.findall(r"for (\d+) s \(away\)", said)]
    assert 4 <= len(seconds) <= 8 and seconds[-1] > 300, said
    assert said.count("the store accepts checkpoints again") == 1
    assert names(tmp_path / "home")[-1] == "step-000000000700.a0001"
    assert (
        max(name.step for name in map(CheckpointName.parse, names(tmp_path / "home")) if name and name.step < 700)
        == 690
    )
    assert same(whole.everything(), run.everything())


def test_after_the_limit_the_steps_wait_until_it_is_saved(
    away: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guards, "PERIOD_S", 0.02)
    run, clock, waited = Run(tmp_path), Clock(), list[int]()
    run.checkpoints.background.outage.now = clock
    with NoticeWatcher([], grace_s=None) as watcher:
        recorder = GoodputRecorder(run.checkpoints.home, 1, 1, writes=False, started=time.perf_counter())
        guard = Guard(run.checkpoints, CheckpointInterval(steps=5), watcher, recorder, unsaved_limit_s=30.0)
        run.checkpoints.prepare({"step": 0})
        guard.begin(0)
        away["store"] = True
        for step in range(1, 61):
            clock.now += 1.0
            start = guard.before_step()
            run.steps(1)
            guard.finished(step, guard.enqueued(start))
            refused = away["store"]
            back = threading.Timer(0.5, away.__setitem__, ("store", False))
            if step == 36:
                back.start()
            guard.after_step(step, lambda step=step: ({"step": step}, None))  # type: ignore[misc]
            guard._exchange_after(step, lambda: None)
            if refused and not away["store"]:
                waited.append(step)  # it lasted until the store was back
        run.checkpoints.finish()
        guard.close()
    assert waited == [36], "the first save that the store did not take was due at step 5"
    assert "no checkpoint could be saved for 30 s (training.unsaved_limit)" in capsys.readouterr().err
    assert names(tmp_path)[-1] == "step-000000000060.a0001"


#: Seconds that a step is made longer.
SLEEP_S = 0.02


@pytest.mark.prove
@pytest.mark.parametrize(("seconds", "every", "steps"), [(2, 20, 144), (60, 40, 3600)])
def test_steps_go_on_and_end_with_the_same_weights(
    seconds: int, every: int, steps: int, prepared: Path, store: FaultyS3, tmp_path: Path
) -> None:
    """Steps of 20 ms or a little more, a save at some of them; the store refuses every connection for a while."""
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": store.url}
    whole, disturbed = (
        TrainingJob(
            prepared,
            tmp_path / name,
            2,
            f"s3://bucket/{tmp_path.name}/{name}",
            steps=steps,
            checkpoint_every=every,
            step_s=SLEEP_S,
            patience_s=120,  # one rank waits for the request of another, which is tried for 37 s
            limit_s=400,
            environment=environment,
        )
        for name in ("whole", "disturbed")
    )
    refused, away = store.refused, list[float]()

    def go_away() -> None:
        # Once it has saved: the start needs the store.
        while sum(line.startswith("PUT") and "/manifest.json" in line for line in list(store.requests)) < 1:
            time.sleep(0.01)
        store.down_until = time.monotonic() + seconds
        away.append(time.time())

    store.requests.clear()
    threading.Thread(target=go_away, daemon=True).start()
    assert run_attempt(disturbed).finished
    assert store.refused > refused
    began = [float(line) for line in (disturbed.place / "times-0").read_text().split()]
    within = [step for step in began if away[0] <= step <= away[0] + seconds]
    assert run_attempt(whole).finished
    times = [float(line) for line in (whole.place / "times-0").read_text().split()]
    usual = (len(times) - 1) / (times[-1] - times[0])
    ratio = len(within) / seconds / usual
    print(f"\nstore away for {seconds} s: {ratio:.3f} of the {usual:.1f} steps a second without")
    assert ratio > (0.9 if seconds > 5 else 0.5)
    log = (disturbed.place / "log-0").read_text()
    assert ("no checkpoint could be saved" in log and "the store accepts checkpoints again" in log) == (seconds > 5), (
        log
    )
    assert result_digests(whole) == result_digests(disturbed)
