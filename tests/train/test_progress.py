"""The progress line: speed and device utilisation."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from slipstream.pipeline.train.loop import progress
from slipstream.pipeline.train.loop.progress import ProgressDisplay, device_texts
from slipstream.shared.artifacts.results.training import ValidationPoint
from slipstream.shared.telemetry.records import DeviceReading, Sample
from slipstream.shared.telemetry.ring import SILENT_S, SampleRing
from tests.support.sampler_process import device, sample

BATCH = 64
POINT = ValidationPoint(step=120, epoch=20.0, loss=0.03141, accuracy=0.9959)


def sampled(directory: Path, devices: Sequence[DeviceReading], ago: float = 0.0) -> Path:
    """The host uses half of a processor of four."""
    ring, now = SampleRing(directory), time.time()
    for number in range(4):
        ring.add(sample(now - ago - 3 + number, *devices))
    return directory


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the display sees."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def display(where: Path | None, done: int = 0) -> ProgressDisplay:
    return ProgressDisplay(120, done, lambda step: BATCH * step, shown=True, sampled=where)


def test_a_line_has_what_was_trained_since_the_last_and_what_the_devices_do(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = display(sampled(tmp_path, [device(), device("GPU-1", 1, busy=0.75)]), done=20)
    clock[0] += 10
    shown.evaluated(70, replace(POINT, step=70, epoch=11.7))
    clock[0] += 2
    shown.evaluated(90, replace(POINT, step=90, epoch=15.0))  # too early for a line
    clock[0] += 2
    shown.evaluated(120, POINT)
    assert capsys.readouterr().out.splitlines() == [
        "train        step 70/120  epoch 11.7  validation loss 0.0314  accuracy 0.9959  320 rows/s  "
        "utilisation 50-75 %  memory 25 %",
        "train        step 120/120  epoch 20.0  validation loss 0.0314  accuracy 0.9959  800 rows/s  "
        "utilisation 50-75 %  memory 25 %",
    ]


def test_without_a_sampler_there_are_rows_alone(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = display(None)
    clock[0] += 1
    shown.evaluated(120, POINT)
    line = "train        step 120/120  epoch 20.0  validation loss 0.0314  accuracy 0.9959  7,680 rows/s\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([device()], ["utilisation 50 %", "memory 25 %"]),
        ([device(busy=None)], ["memory 25 %"]),
        ([replace(device(), memory_used_bytes=None)], ["utilisation 50 %"]),
        ([replace(device(), up=False)], []),
        ([device(), replace(device("GPU-1", 1, busy=0.1), up=False)], ["utilisation 50 %", "memory 25 %"]),
        # Of the host: half a processor of four, 5 of 16 GB.
        ([], ["utilisation 12 %", "memory 31 %"]),
    ],
)
def test_what_the_devices_do(tmp_path: Path, devices: list[DeviceReading], expected: list[str]) -> None:
    assert device_texts(sampled(tmp_path, devices)) == expected


def test_figures_of_a_sampler_that_has_ended_are_not_shown(tmp_path: Path) -> None:
    assert device_texts(sampled(tmp_path, [device()], ago=SILENT_S + 5)) == []


@pytest.mark.parametrize("error", [OSError("gone"), OverflowError("inf"), RecursionError("deep")])
def test_no_training_ends_of_what_is_read(tmp_path: Path, error: Exception) -> None:
    assert device_texts(tmp_path / "nowhere") == []
    with mock.patch.object(progress, "latest_samples", side_effect=error):
        assert device_texts(tmp_path) == []


def test_the_bar_is_renewed_each_second_and_reads_no_more_often(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown, posts, reads = display(sampled(tmp_path, [device()])), list[str](), list[Path]()
    monkeypatch.setattr(shown._bar, "set_postfix_str", posts.append)
    read = progress.latest_samples

    def counted(directory: Path, count: int) -> list[Sample]:
        reads.append(directory)
        return read(directory, count)

    monkeypatch.setattr(progress, "latest_samples", counted)
    for done in range(1, 101):
        clock[0] += 0.125
        shown.step(done)
        if done == 50:
            shown.evaluated(done, POINT)
    assert len(reads) == 12
    assert posts[0] == "512 rows/s  utilisation 50 %  memory 25 %"
    assert posts[-1] == "validation loss 0.0314  accuracy 0.9959  512 rows/s  utilisation 50 %  memory 25 %"
    assert shown._bar.leave, "it stays at the end"
    shown.close()


def test_other_ranks_show_and_read_nothing(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ProgressDisplay(120, 0, lambda step: step, shown=False, sampled=sampled(tmp_path, [device()]))
    with mock.patch.object(progress, "latest_samples", side_effect=AssertionError("read")):
        clock[0] += 10
        shown.step(60)
        shown.evaluated(120, POINT)
    assert capsys.readouterr().out == ""
