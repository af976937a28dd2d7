"""A pod's usage from control groups of both versions, and its processes' waiting time for a core."""

import itertools
import os
import signal
import subprocess
from pathlib import Path

import pytest

from slipstream.shared.telemetry.records import HostReading
from slipstream.shared.telemetry.sampler.sampling import CpuWaits, HostUsage, descendant_processes
from tests.support.control_groups import tree
from tests.support.sampler_process import until

GIB = 1 << 30


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for variable in ("SLIPSTREAM_CPU", "SLIPSTREAM_MEMORY"):
        monkeypatch.delenv(variable, raising=False)


def test_version_2(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/\n",
        cpu_DOT_max="150000 100000",
        cpu_DOT_stat="usage_usec 2500000\nnr_periods 40\nnr_throttled 10\nthrottled_usec 700000\n",
        memory_DOT_max=str(2 * GIB),
        memory_DOT_current=str(GIB),
        memory_DOT_stat="anon 5\ninactive_file 1024\n",
    )
    assert HostUsage(1, root).read() == HostReading(2.5, 1.5, 0, 0.7, 10, 40, GIB - 1024, 2 * GIB)


def test_use_and_limits_are_those_of_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rehearsal, where the group holds several pods, each with less memory: else "memory 272 %"."""
    monkeypatch.setenv("SLIPSTREAM_MEMORY", "1Gi")
    monkeypatch.setenv("SLIPSTREAM_CPU", "1")
    root = tree(
        tmp_path,
        "0::/\n",
        cpu_DOT_max="400000 100000",
        cpu_DOT_stat="usage_usec 2500000\n",
        memory_DOT_max=str(4 * GIB),
        memory_DOT_current=str(3 * GIB),
    )
    read = HostUsage(1, root).read()
    assert (read.memory_used_bytes, read.memory_limit_bytes, read.cpus) == (3 * GIB, 4 * GIB, 4.0)


def test_version_1_with_the_quota_in_the_group_above(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "4:memory:/pod/one\n2:cpu:/pod/one\n1:cpuacct:/pod/one\n",
        cpuacct__pod__one__cpuacct_DOT_usage="3000000000",
        cpuacct__pod__cpuacct_DOT_usage="9000000000",
        cpu__pod__one__cpu_DOT_stat="nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
        cpu__pod__cpu_DOT_stat="nr_periods 30\nnr_throttled 20\nthrottled_time 1500000000\n",
        cpu__pod__cpu_DOT_cfs_quota_us="50000",
        cpu__pod__cpu_DOT_cfs_period_us="100000",
        memory__pod__one__memory_DOT_usage_in_bytes=str(GIB),
        memory__pod__memory_DOT_limit_in_bytes=str(3 * GIB),
    )
    assert HostUsage(1, root).read() == HostReading(3.0, 0.5, 0, 1.5, 20, 30, GIB, 3 * GIB)


def test_a_machine_without_groups(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  100 20 30 9999 8888 5 6 7 55 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    read = HostUsage(1, tmp_path).read()
    ticks = 100 + 20 + 30 + 5 + 6 + 7
    assert read.cpu_seconds == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))
    assert (read.cpus, read.memory_used_bytes, read.memory_limit_bytes) == (8, 600 * 1024, 1000 * 1024)


def test_a_system_without_proc(tmp_path: Path) -> None:
    assert HostUsage(1, tmp_path).read() == HostReading(0.0, 8)


def process(root: Path, number: int, parent: int, **waits: int) -> None:
    """A process with these threads, each with the nanoseconds for which it has waited."""
    for thread, waited in waits.items():
        path = root / f"proc/{number}/task/{thread.removeprefix('t')}/schedstat"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"777 {waited} 3\n")
    (root / f"proc/{number}/stat").write_text(f"{number} (a name) (of) 2) S {parent} 1 1\n")


def test_the_waits_of_descendants_count_also_after_their_threads_end(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, t10=10**12)
    process(tmp_path, 11, 10, t11=2 * 10**9, t12=10**9)
    process(tmp_path, 13, 11, t13=10**9)
    process(tmp_path, 20, 1, t20=10**12)
    waits = CpuWaits(10, tmp_path)
    assert waits.seconds() == 4
    (tmp_path / "proc/11/task/12/schedstat").unlink()
    process(tmp_path, 11, 10, t11=5 * 10**9)
    waits._next = 0
    assert waits.seconds() == 7
    process(tmp_path, 13, 11, t13=5 * 10**8)  # another thread with the number of an ended one
    waits._next = 0
    assert waits.seconds() == 7.5


def test_counting_takes_its_share_of_a_processor_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pass of 20 ms of CPU time the next one is 20 s later."""
    process(tmp_path, 11, 10, t11=10**9)
    now, used = [100.0], itertools.count(0, 0.02)
    monkeypatch.setattr("slipstream.shared.telemetry.sampler.sampling.time.monotonic", lambda: now[0])
    monkeypatch.setattr("slipstream.shared.telemetry.sampler.sampling.time.thread_time", lambda: next(used))
    waits = CpuWaits(10, tmp_path)
    waits.seconds()
    process(tmp_path, 11, 10, t11=2 * 10**9)
    now[0] += 19.5
    assert waits.seconds() == 1
    now[0] += 1
    assert waits.seconds() == 2


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits")
def test_real_processes_that_share_a_processor_wait() -> None:
    """Two that want all of one processor, below a shell, wait for each other."""
    core = (
        Path("/proc/self/status").read_text().partition("Cpus_allowed_list:")[2].replace("-", ",").split(",")[0].strip()
    )
    loop = "while true; do :; done"
    shell = subprocess.Popen(
        ["taskset", "-c", core, "bash", "-c", f"({loop}) & ({loop})& wait"], start_new_session=True
    )
    try:
        until(lambda: len(descendant_processes(shell.pid, "/proc")) == 2)
        waits = CpuWaits(shell.pid)
        before = waits.seconds()

        def have_waited() -> bool:
            waits._next = 0
            return waits.seconds() > before + 0.2

        until(have_waited)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_the_process_that_asks_is_no_descendant() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert str(child.pid) in descendant_processes(os.getpid(), "/proc")
        assert str(os.getpid()) not in descendant_processes(os.getppid(), "/proc")
    finally:
        child.kill()
        child.wait()
