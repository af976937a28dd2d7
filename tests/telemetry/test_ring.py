"""Samples on disk: retention, and recovery from cut and damaged files."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.shared.telemetry import ring
from slipstream.shared.telemetry.records import DeviceReading, Sample
from slipstream.shared.telemetry.ring import (
    FILE_S,
    KEPT_S,
    MINUTES,
    RingReader,
    SampleRing,
    latest_samples,
    newest_sample,
    read_file,
    read_samples,
)
from tests.support.proving import first_few
from tests.support.sampler_process import device, sample

#: A full hour.
BEGIN = 1_700_002_800
DAY_S = 86_400


def write(directory: Path, samples: Iterable[Sample]) -> list[Sample]:
    kept, written = SampleRing(directory), list(samples)
    for each in written:
        kept.add(each)
    return written


@pytest.fixture
def written(tmp_path: Path) -> list[Sample]:
    """Four in one file, with the devices' names before the first and before the third."""
    bare = DeviceReading("GPU-1", 1, "bare", up=False)
    return write(tmp_path, (sample(BEGIN + 40.5 * i, device(joules=1000.0 + i), bare) for i in range(4)))


def file_of(directory: Path) -> Path:
    (path,) = directory.glob("*.ring")
    return path


def test_samples_come_back_as_they_were(tmp_path: Path, written: list[Sample]) -> None:
    assert read_samples(tmp_path) == written


def test_another_sampler_goes_on_where_one_ended(tmp_path: Path, written: list[Sample]) -> None:
    later = write(tmp_path, [sample(BEGIN + 200.0, device("GPU-9"))])
    assert read_samples(tmp_path) == written + later


def test_nothing_is_no_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == read_samples(tmp_path / "nowhere") == []
    (tmp_path / "seconds-5.ring").mkdir()
    (tmp_path / "seconds-x.ring").write_text("not a time")
    (tmp_path / "minutes.ring").write_text("SLT1 is the start of a frame")
    assert read_samples(tmp_path) == []


def test_cut_at_every_length_the_samples_before_it_are_there(tmp_path: Path, written: list[Sample]) -> None:
    path = file_of(tmp_path)
    content, counts = path.read_bytes(), set()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        found = read_samples(tmp_path)
        assert found == written[: len(found)]
        counts.add(len(found))
    assert counts == {0, 1, 2, 3}


def test_a_sample_after_a_cut_one_is_found(tmp_path: Path, written: list[Sample]) -> None:
    """As where a full disk took only a part of one."""
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    later = write(tmp_path, [sample(BEGIN + 200.0, device())])
    assert read_samples(tmp_path) == written[:3] + later


@pytest.mark.parametrize("flip", first_few([0x01, 0xFF]))
def test_whatever_byte_is_flipped_costs_one_sample_at_most(tmp_path: Path, written: list[Sample], flip: int) -> None:
    """Names are there twice."""
    path = file_of(tmp_path)
    content, losses = path.read_bytes(), 0
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
        found = read_samples(tmp_path)
        assert len(found) >= 3 and all(each in written for each in found)
        losses += len(found) == 3
    assert losses > len(content) / 2


def test_devices_whose_names_are_lost_are_left_out(tmp_path: Path) -> None:
    (kept,) = write(tmp_path, [sample(BEGIN, device())])
    path = file_of(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[content.index(b"SLT1S") :])
    assert read_samples(tmp_path) == [replace(kept, devices=())]


def seconds_of(directory: Path, count: int) -> list[Sample]:
    """Samples of 8 devices each second. Of the device i, busy is i tenths in even seconds and nothing in odd ones."""
    return write(
        directory,
        (
            sample(at, *(device(f"GPU-{i}", i, busy=i / 8 if at % 2 == 0 else 0.0, joules=at) for i in range(8)))
            for at in range(BEGIN, BEGIN + count)
        ),
    )


@pytest.mark.prove
def test_an_hour_in_seconds_and_before_it_minutes_in_a_few_megabytes(tmp_path: Path) -> None:
    written = seconds_of(tmp_path, KEPT_S + 4 * FILE_S)
    found = read_samples(tmp_path)
    seconds = [each for each in found if each in written[-KEPT_S - 2 * FILE_S :]]
    assert KEPT_S <= len(seconds) <= KEPT_S + 2 * FILE_S and seconds == written[-len(seconds) :]
    minutes = found[: -len(seconds)]
    assert [each.at for each in minutes] == [BEGIN + 60 * i + 59 for i in range(len(minutes))]
    assert len(minutes) * 60 + len(seconds) == len(written)
    last = written[59]
    assert minutes[0].host == last.host
    assert minutes[0].devices == tuple(replace(reading, busy=reading.index / 16) for reading in last.devices)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    in_minutes = (tmp_path / MINUTES).stat().st_size
    assert size + in_minutes * (DAY_S - len(minutes) * 60) / (len(minutes) * 60) <= 5_000_000


def test_a_kill_between_minutes_and_their_seconds_counts_nothing_twice(tmp_path: Path) -> None:
    written = write(tmp_path, (sample(BEGIN + i, device(busy=i / 128)) for i in range(120)))
    seconds = file_of(tmp_path).read_bytes()
    write(tmp_path, [sample(BEGIN + 2 * KEPT_S, device())])
    path = tmp_path / f"seconds-{BEGIN}.ring"
    assert not path.exists()
    path.write_bytes(seconds)
    assert read_samples(tmp_path)[:-1] == written
    write(tmp_path, [sample(BEGIN + 3 * KEPT_S, device())])
    assert [each.at - BEGIN for each in read_samples(tmp_path)] == [59, 119, 2 * KEPT_S, 3 * KEPT_S]


def test_of_a_minute_the_readings_count_in_which_the_device_was_up(tmp_path: Path) -> None:
    down = DeviceReading("GPU-0", 0, 'A "100"', up=False)
    idle = replace(device(busy=0.1), throttled=(), power_watts=None, memory_used_bytes=10)
    readings = [device(busy=0.9), idle, idle, down]
    write(tmp_path, (sample(BEGIN + i, reading) for i, reading in enumerate(readings)))
    write(tmp_path, [sample(BEGIN + 2 * KEPT_S)])
    ((mean,), _) = (each.devices for each in read_samples(tmp_path))
    assert mean.up and mean.busy == pytest.approx(1.1 / 3)
    assert (mean.power_watts, mean.throttled) == (350.5, ())
    assert mean.memory_used_bytes == (20_000_000_001 + 20) // 3


def test_a_device_that_was_never_up_stays_down(tmp_path: Path) -> None:
    down = DeviceReading("GPU-0", 0, "lost", up=False)
    write(tmp_path, (sample(BEGIN + i, down) for i in range(3)))
    write(tmp_path, [sample(BEGIN + 2 * KEPT_S)])
    assert read_samples(tmp_path)[0].devices == (down,)


def test_the_latest_are_the_end_of_all(tmp_path: Path) -> None:
    """More than is read of a file, and over the begin of the next one."""
    devices = [device(f"GPU-{number}", number) for number in range(8)]
    written = write(tmp_path, (sample(BEGIN + i, *devices) for i in range(FILE_S + 3)))
    size = max(path.stat().st_size for path in tmp_path.glob("*.ring"))
    assert size > 4 * (ring.BEGIN_BYTES + ring.END_BYTES)
    for count in (1, 3, 6, 40):
        assert latest_samples(tmp_path, count) == written[-count:]
    assert newest_sample(tmp_path) == written[-1]


def test_the_latest_of_few_or_none(tmp_path: Path) -> None:
    assert newest_sample(tmp_path / "nowhere") is None and latest_samples(tmp_path, 3) == []
    written = write(tmp_path, [sample(BEGIN, device()), sample(BEGIN + 1, device())])
    assert latest_samples(tmp_path, 3) == written
    path = file_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert newest_sample(tmp_path) == written[0]


def test_the_latest_of_minutes_where_there_are_no_seconds(tmp_path: Path) -> None:
    written = write(tmp_path, (sample(BEGIN + 60 * i, device()) for i in range(5)))
    file_of(tmp_path).rename(tmp_path / MINUTES)
    assert latest_samples(tmp_path, 2) == written[-2:]


def test_a_reader_reads_only_what_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(path: Path, named: ring.Names) -> list[Sample]:
        asked.append(path.name)
        return read_file(path, named)

    monkeypatch.setattr(ring, "read_file", counted)
    reader, written = RingReader(tmp_path), write(tmp_path, (sample(BEGIN + i, device()) for i in range(FILE_S + 10)))
    assert reader.read() == written
    asked.clear()
    written += write(tmp_path, [sample(BEGIN + FILE_S + 10, device())])
    assert reader.read() == written and asked == [f"seconds-{BEGIN + FILE_S}.ring"]
    # The first file becomes minutes, and is no longer there.
    write(tmp_path, [sample(BEGIN + 2 * KEPT_S, device())])
    assert reader.read() == read_samples(tmp_path) and len(reader.read()) < FILE_S
