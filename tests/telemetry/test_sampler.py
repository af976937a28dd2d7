"""The sampler as a process: readings, hanging drivers, its end, and its own cost."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from slipstream.operations.proofs.processes import free_port
from slipstream.shared.telemetry.records import DeviceReading, Sample
from slipstream.shared.telemetry.ring import read_samples
from slipstream.shared.telemetry.sampler.sampling import DriverQuery, Sampler
from slipstream.shared.telemetry.totals import read_node, write_totals
from tests.support.fake_nvml import ROOT, FakeNvml
from tests.support.processes import running
from tests.support.sampler_process import device, sampling, totals, until
from tests.support.wording import same_wording

#: Modules that the sampled work needs and the sampler does not.
HEAVY = ("torch", "numpy", "boto3", "pandas", "flytekit", "pydantic")


def newest(directory: Path) -> Sample | None:
    samples = read_samples(directory)
    return samples[-1] if samples else None


def ups(directory: Path) -> list[bool]:
    sample = newest(directory)
    return [device.up for device in sample.devices] if sample else []


@pytest.mark.prove
def test_it_samples_each_second_and_counts_until_its_end(nvml: FakeNvml, tmp_path: Path) -> None:
    with sampling(tmp_path, nvml.environment(), "--price=spot=3600") as process:
        until(lambda: len(read_samples(tmp_path)) >= 3)
        process.send_signal(signal.SIGINT)  # Ctrl-C is for the process that started it
        count = len(read_samples(tmp_path))
        process.terminate()
        assert process.wait(10) == 0
        assert process.stderr and process.stderr.read() == ""
    samples = read_samples(tmp_path)
    assert len(samples) > count
    assert samples[2].at - samples[0].at > 1
    assert abs(samples[-1].at - time.time()) < 60
    assert [device.name for device in samples[-1].devices] == ["Fake 100"] * 2
    assert samples[-1].host.cpu_seconds > 0
    node = read_node(tmp_path)
    assert 0 < node.gpu_seconds <= 2 * node.seconds
    assert node.cost_dollars == {"spot": pytest.approx(node.seconds)}
    joules = [[device.energy_joules or 0 for device in sample.devices] for sample in samples if sample.devices]
    assert list(node.energy_joules.values()) == [
        last - first for first, last in zip(joules[0], joules[-1], strict=True)
    ]
    assert min(node.energy_joules.values()) > 0


def test_a_driver_that_never_returns_costs_its_devices_only(nvml: FakeNvml, tmp_path: Path) -> None:
    with sampling(tmp_path, nvml.environment()) as process:
        until(lambda: ups(tmp_path) == [True, True])
        nvml.play("lost 1")
        until(lambda: ups(tmp_path) == [True, False])
        nvml.play("hang nvmlDeviceGetPowerUsage")
        until(lambda: ups(tmp_path) == [False, False])
        count = len(read_samples(tmp_path))
        until(lambda: len(read_samples(tmp_path)) > count)
        last = read_samples(tmp_path)[-1]
        assert last.devices[0] == DeviceReading("GPU-00000000-0000", 0, "Fake 100", up=False)
        assert last.host.memory_used_bytes
        process.terminate()
        assert process.wait(10) == 0
        assert process.stderr and process.stderr.read() == ""


def test_a_kill_costs_nothing_that_was_sampled(nvml: FakeNvml, tmp_path: Path) -> None:
    with sampling(tmp_path, nvml.environment()) as process:
        until(lambda: len(read_samples(tmp_path)) >= 2)
        seen = read_samples(tmp_path)
        process.kill()
        process.wait()
    assert read_samples(tmp_path)[: len(seen)] == seen
    assert read_node(tmp_path).seconds >= seen[-1].at - seen[0].at


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, time
from pathlib import Path
from slipstream.shared.telemetry.watch import MetricLabels, start_sampler
print(start_sampler(Path({str(tmp_path / "t")!r}), MetricLabels("e", "t", 0, "n"), {{}}).pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout
    sampler = int(parent.stdout.readline())
    until(lambda: read_samples(tmp_path / "t"))
    assert running(sampler)
    parent.kill()
    parent.wait()
    until(lambda: not running(sampler))


def test_a_parent_that_is_gone_already_is_not_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream.shared.telemetry.sampler", "--execution=e", "--task=t", "--attempt=0"]
    run = subprocess.run([*command, "--node=n", f"--parent={os.getppid()}", tmp_path], timeout=30, check=False)
    assert run.returncode == 0


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with sampling(tmp_path / "file/below") as process:
        assert process.wait(20) == 0
        assert process.stderr
        line = (
            f"telemetry    warning: the sampler failed and takes no samples: {tmp_path}/file/below: Not a directory\n"
        )
        assert process.stderr.read() == line


def test_a_disk_that_takes_no_samples_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "telemetry"
    sampler = Sampler(directory, os.getpid(), {}, time.time())
    directory.rmdir()
    sampler.sample()
    sampler.sample()
    same_wording(capsys.readouterr().err)
    assert sampler.state.sample and sampler.state.sample.host.cpus > 0
    directory.mkdir()
    sampler.sample()
    assert read_samples(directory) == [sampler.state.sample]


# A driver in its thread


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next() -> None:
    answers: queue.Queue[tuple[DeviceReading, ...]] = queue.Queue()
    driver = DriverQuery(answers.get)
    answers.put((device(busy=0.1),))
    assert driver.ask() and driver.answer(10)[0].busy == 0.1
    assert driver.ask() and not driver.answer(0.01)[0].up
    assert not driver.ask() and not driver.answer(0.0)[0].up  # nor asked again
    answers.put((device(busy=0.2),))
    answers.put((device(busy=0.3),))
    until(driver.ask)
    assert driver.answer(10)[0].busy == 0.3


def test_a_device_that_a_driver_no_longer_lists_is_not_up() -> None:
    lists = iter([(device("a"), device("b")), (device("b"),)])
    driver = DriverQuery(lambda: next(lists))
    driver.ask()
    driver.answer(10)
    driver.ask()
    assert [(reading.uuid, reading.up) for reading in driver.answer(10)] == [("a", False), ("b", True)]


def test_a_driver_that_fails_is_one_line_and_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    asked = threading.Event()

    def fail() -> tuple[DeviceReading, ...]:
        asked.set()
        raise ArithmeticError("no figure")

    driver = DriverQuery(fail)
    for _ in range(3):
        asked.clear()
        driver.ask()
        assert driver.answer(10) == () and asked.is_set()
    same_wording(capsys.readouterr().err)


# What it takes


def test_it_loads_nothing_heavy() -> None:
    program = "import sys, slipstream.shared.telemetry.sampler.__main__; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(HEAVY) & set(run.stdout.split())


def scrape(port: int) -> int:
    """Return the number of lines of metrics; 0 without a server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return len(answer.read().splitlines())
    except OSError:
        return 0


def test_it_takes_40_mb_with_8_devices_served_and_scraped(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.play("devices 8")
    port = free_port()
    for rank in range(8):
        write_totals(tmp_path, totals(rank))
    with sampling(tmp_path, nvml.environment() | {"SLIPSTREAM_METRICS": f"127.0.0.1:{port}"}) as process:
        until(lambda: scrape(port) > 400 and len(read_samples(tmp_path)) >= 2)
        status = Path(f"/proc/{process.pid}/status").read_text()
    assert int(status.partition("VmHWM:")[2].split()[0]) < 40_000


@pytest.mark.prove
def test_it_takes_5_ms_of_cpu_a_second_with_8_devices_served_and_scraped(nvml: FakeNvml, tmp_path: Path) -> None:
    """Over 30 s, scraped every 5 s, with 8 other processes of 33 threads each."""
    nvml.play("devices 8")
    port = free_port()
    for rank in range(8):
        write_totals(tmp_path, totals(rank))
    threads = "import threading, time\nfor _ in range(32): threading.Thread(target=time.sleep, args=(99,)).start()"
    beside = [subprocess.Popen([sys.executable, "-c", threads]) for _ in range(8)]
    try:
        with sampling(tmp_path, nvml.environment() | {"SLIPSTREAM_METRICS": f"127.0.0.1:{port}"}) as process:
            until(lambda: scrape(port) > 400)
            before, began = cpu_seconds(process.pid), time.monotonic()
            for _ in range(6):
                time.sleep(5)
                assert scrape(port) > 400
            taken = (cpu_seconds(process.pid) - before) / (time.monotonic() - began)
    finally:
        for other in beside:
            other.kill()
            other.wait()
    print(f"{taken * 1000:.2f} ms of CPU a second")
    assert taken < 0.005


def cpu_seconds(process: int) -> float:
    """By the scheduler's own count: ticks of 10 ms are too coarse."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
