"""Failures of the sampler do not stop or delay the sampled work."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.operations.proofs.processes import free_port
from slipstream.shared.telemetry import watch
from slipstream.shared.telemetry.ring import read_samples
from slipstream.shared.telemetry.totals import read_node
from slipstream.shared.telemetry.watch import telemetry_sampled
from tests.support.fake_nvml import FakeNvml
from tests.support.processes import running
from tests.support.sampler_process import LABELS, until
from tests.support.wording import same_wording


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLIPSTREAM_METRICS", "SLIPSTREAM_PUSHGATEWAY"):
        monkeypatch.delenv(variable, raising=False)


def sampler_of(directory: Path) -> int:
    """The process that keeps samples there."""
    until(lambda: read_samples(directory))
    command = f"\0--\0{directory}\0".encode()
    (line,) = (line for line in Path("/proc").glob("[0-9]*/cmdline") if line.read_bytes().endswith(command))
    return int(line.parent.name)


def test_the_work_is_watched_as_long_as_it_lasts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with telemetry_sampled(tmp_path, LABELS, {"spot": 2.5}):
        sampler = sampler_of(tmp_path)
        assert running(sampler)
    assert not running(sampler)
    assert read_node(tmp_path).cost_dollars["spot"] > 0
    assert capfd.readouterr().err == ""


def test_what_the_work_raises_is_raised_and_the_sampler_ends(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), telemetry_sampled(tmp_path, LABELS):
        sampler = sampler_of(tmp_path)
        raise ZeroDivisionError
    assert not running(sampler)


def test_the_sampler_finds_this_package_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(isolated(tmp_path)))
    with telemetry_sampled(tmp_path / "telemetry", LABELS):
        until(lambda: read_samples(tmp_path / "telemetry"))


def isolated(directory: Path) -> Path:
    """A Python that has the libraries and not this package."""
    script = directory / "python"
    site = next(path for path in sys.path if path.endswith("site-packages"))
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {Path(sys.executable).resolve()} -S "$@"\n')
    script.chmod(0o755)
    return script


def test_the_sampler_keeps_none_of_the_agents_files_open(tmp_path: Path) -> None:
    """A sampler that hangs in the driver would block readers of the agent's output."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    before = files_of(os.getpid()) - {"/dev/null"}
    try:
        with telemetry_sampled(tmp_path, LABELS):
            sampler = sampler_of(tmp_path)
            assert str(Path(f"/proc/self/fd/{writer}").readlink()) in before
            assert not files_of(sampler) & before
    finally:
        os.close(reader)
        os.close(writer)


def files_of(process: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that by which they are listed
            found.add(str(path.readlink()))
    return found


def test_what_the_sampler_says_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.endswith("\n")

    with telemetry_sampled(tmp_path / "file", LABELS):
        until(is_said)
    same_wording(said)


def test_a_sampler_that_cannot_be_started_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    done = []
    with telemetry_sampled(tmp_path, LABELS):
        done.append(1)
    (line,) = capsys.readouterr().err.splitlines()
    assert done
    same_wording(line)


def test_a_sampler_that_was_killed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with telemetry_sampled(tmp_path, LABELS):
        sampler = sampler_of(tmp_path)
        os.kill(sampler, signal.SIGKILL)
        until(lambda: not running(sampler))
    same_wording(capsys.readouterr().err)


def test_a_sampler_that_does_not_end_is_killed_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = subprocess.Popen(
        ["bash", "-c", "trap '' TERM; echo; while true; do sleep 0.1; done"], stdout=subprocess.PIPE
    )
    assert deaf.stdout
    deaf.stdout.readline()
    monkeypatch.setattr(watch, "start_sampler", lambda *_: deaf)
    began = time.monotonic()
    with telemetry_sampled(tmp_path, LABELS):
        pass
    assert 0.9 < time.monotonic() - began < 10
    assert deaf.wait(10) == -signal.SIGKILL


def test_a_hung_driver_and_a_dead_gateway_do_not_hold_the_work(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.play("hang all")
    monkeypatch.setattr(
        os, "environ", nvml.environment() | {"SLIPSTREAM_PUSHGATEWAY": f"http://127.0.0.1:{free_port()}"}
    )
    with telemetry_sampled(tmp_path, LABELS, {"spot": 1.0}):
        until(lambda: read_samples(tmp_path))
        began = time.monotonic()
    assert time.monotonic() - began < 10
    (line,) = capsys.readouterr().err.splitlines()
    assert "SLIPSTREAM_PUSHGATEWAY" in line


def test_what_is_over_soon_starts_no_process(tmp_path: Path) -> None:
    with telemetry_sampled(tmp_path / "short", LABELS, after_s=30.0):
        pass
    assert not (tmp_path / "short").exists()
    with telemetry_sampled(tmp_path / "long", LABELS, after_s=0.2):
        until(lambda: bool(read_samples(tmp_path / "long")))
    assert len(read_samples(tmp_path / "long")) >= 2, "the end is sampled, too"


def test_the_time_before_the_sampler_is_paid_for(tmp_path: Path) -> None:
    with telemetry_sampled(tmp_path, LABELS, {"paid": 3600.0}, began_at=time.time() - 50.0):
        until(lambda: read_node(tmp_path).seconds > 0)
    node = read_node(tmp_path)
    assert 50 <= node.seconds < 60 and node.cost_dollars["paid"] == pytest.approx(node.seconds)
