"""The kernel's counters of memory that ran out, from samples and for real."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from slipstream.shared.machine.limits import GIB, MemoryCounters, memory_counters, what_was_killed
from tests.support import REPOSITORY
from tests.support.control_groups import memory_group, tree
from tests.support.wording import same_wording

EVENTS = "low 0\nhigh 0\nmax 41\noom 2\noom_kill 3\noom_group_kill 0\n"


def test_version_2(tmp_path: Path) -> None:
    root = tree(
        tmp_path, "0::/\n", memory_DOT_events=EVENTS, memory_DOT_max=f"{2 * GIB}\n", memory_DOT_peak=f"{2 * GIB - 4096}"
    )
    assert memory_counters(root) == MemoryCounters(3, 2 * GIB - 4096, 2 * GIB)
    assert memory_counters(root).at_limit


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "4:memory:/\n0::/\n",
        memory__memory_DOT_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        memory__memory_DOT_limit_in_bytes=f"{GIB}",
        memory__memory_DOT_max_usage_in_bytes=f"{GIB // 2}",
    )
    assert memory_counters(root) == MemoryCounters(1, GIB // 2, GIB)
    assert not memory_counters(root).at_limit


def test_a_kernel_that_does_not_count(tmp_path: Path) -> None:
    assert memory_counters(tmp_path) == MemoryCounters()
    root = tree(tmp_path, "4:memory:/\n", memory__memory_DOT_oom_control="oom_kill_disable 0\nunder_oom 0\n")
    assert memory_counters(root) == MemoryCounters()


@pytest.mark.parametrize(
    "now",
    [
        MemoryCounters(1, GIB, GIB),
        MemoryCounters(2, GIB, GIB),
        MemoryCounters(3, None, 1.5 * GIB),
        MemoryCounters(2, GIB // 2, GIB),
        MemoryCounters(2),
    ],
)
def test_what_is_said(now: MemoryCounters) -> None:
    same_wording(what_was_killed(MemoryCounters(1), now))


#: Moves itself into a group, starts a child that takes more than there is, and another that does not.
SCRIPT = """
import json, subprocess, sys
from dataclasses import asdict
from pathlib import Path
from slipstream.shared.machine.limits import memory_counters
Path(sys.argv[1], "cgroup.procs").write_text("0")
before = memory_counters()
codes = [subprocess.run([sys.executable, "-c", f"bytearray({mib} << 20)"]).returncode for mib in (8, 400)]
print(json.dumps([asdict(before), asdict(memory_counters()), codes]))
"""


def test_a_child_that_the_kernel_kills_is_counted() -> None:
    with memory_group(200 << 20) as group:
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, group], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
        )
    assert ran.returncode == 0, ran.stderr
    before, after, codes = json.loads(ran.stdout)
    assert codes == [0, -9]
    assert MemoryCounters(**before).kills == 0 and MemoryCounters(**after).kills == 1
    assert MemoryCounters(**after).at_limit and after["limit"] == 200 << 20
    assert asdict(MemoryCounters(**after)) == after
