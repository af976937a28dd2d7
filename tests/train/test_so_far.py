"""Live progress: rank 0's file, and the summary of attempt records."""

import time
from pathlib import Path

import pytest

from slipstream.pipeline.train import so_far
from slipstream.pipeline.train.so_far import live_attempts, progress_written, read_progress
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.artifacts.results.ledger import STEPS, AttemptRecord
from slipstream.shared.artifacts.results.training import LiveProgress, LossPoint
from tests.support.wording import same_wording

POINT = LossPoint(3, 0.5, 0.7, 1e-3)


def at(step: int) -> LiveProgress:
    return LiveProgress(step, 10, 0, [POINT], [], None)


def test_it_is_written_as_it_goes_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(so_far, "PERIOD_S", 0.01)
    path, step = tmp_path / "so_far.json", 1
    assert read_progress(path, str(tmp_path / "home"), 8, running=True) is None
    with progress_written(path, lambda: at(step)):
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline
        step = 7
    assert read_progress(path, str(tmp_path / "home"), 8, running=True) == at(7)
    assert [each.name for each in tmp_path.iterdir()] == ["so_far.json"]


def test_nothing_that_goes_wrong_reaches_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with progress_written(tmp_path / "no" / "such" / "directory.json", lambda: at(1)):
        pass
    assert capfd.readouterr().err.count("live training progress could not be written") == 1
    with progress_written(None, lambda: at(1 // 0)):
        pass


def test_the_last_attempt_goes_on_and_those_before_say_why_they_ended() -> None:
    first = AttemptRecord(1, 2, 0, 40, 30, ended="SIGTERM", wall=9.0)
    first.seconds[STEPS] = 4.0
    second = AttemptRecord(2, 2, 30, 30, 30)
    told = live_attempts([first, second], batch_size=8, running=True)
    assert [(each.rows_per_s, each.ended) for each in told] == [(80.0, "SIGTERM"), (None, "")]
    same_wording(live_attempts([first, second], batch_size=8, running=False)[-1].ended)


def test_numbers_that_are_none_are_not_written(tmp_path: Path) -> None:
    """As JSON knows none of them; the file before stays."""
    path = tmp_path / "so_far.json"
    so_far.write_progress(path, at(1))
    with pytest.raises(ValueError):
        so_far.write_progress(path, LiveProgress(2, 10, 0, [LossPoint(3, 0.5, float("nan"), 1e-3)], [], None))
    assert from_json(path.read_bytes(), LiveProgress, path) == at(1)
