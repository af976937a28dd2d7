"""Limits of a process on its machine: cores, memory, and the resulting number of workers."""

import os
from pathlib import Path

import pytest

from slipstream.shared.distributed import pool
from slipstream.shared.errors import UserError
from slipstream.shared.machine import limits
from slipstream.shared.machine.limits import cpu_quota, memory_limit, parse_quantity
from tests.support.control_groups import tree
from tests.support.wording import refuses

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("4", 4), ("1.5", 1.5), ("2Gi", 2 * GIB), ("2G", 2e9), ("5120Mi", 5 * GIB)]
)
def test_quantities(text: str, number: float) -> None:
    assert parse_quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "4 Gi", "-1", "Gi", "1e3", "4GiB", "٤"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        parse_quantity(text)


def test_version_2_in_a_container(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", cpu_DOT_max="400000 100000\n", memory_DOT_max="8589934592\n")
    assert (cpu_quota(root), memory_limit(root)) == (4, 8 * GIB)


def test_version_2_without_limits(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", cpu_DOT_max="max 100000\n", memory_DOT_max="max\n")
    assert cpu_quota(root) is memory_limit(root) is None


def test_a_group_above_may_be_tighter(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/pods/one\n",
        pods__one__cpu_DOT_max="800000 100000",
        pods__cpu_DOT_max="250000 100000",
        pods__one__memory_DOT_max=f"{2 * GIB}",
        pods__memory_DOT_max="max",
    )
    assert (cpu_quota(root), memory_limit(root)) == (2.5, 2 * GIB)


def test_the_path_of_the_node_leads_nowhere_in_the_container(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/kubepods/pod1/container\n", cpu_DOT_max="150000 100000", memory_DOT_max=f"{GIB}")
    assert (cpu_quota(root), memory_limit(root)) == (1.5, GIB)


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "4:memory:/pod\n2:cpu,cpuacct:/pod\n1:cpuset:/pod\n",
        cpu__pod__cpu_DOT_cfs_quota_us="300000\n",
        cpu__pod__cpu_DOT_cfs_period_us="100000\n",
        cpu__cpu_DOT_cfs_quota_us="-1\n",
        cpu__cpu_DOT_cfs_period_us="100000\n",
        memory__pod__memory_DOT_limit_in_bytes=f"{3 * GIB}\n",
        memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
    )
    assert (cpu_quota(root), memory_limit(root)) == (3, 3 * GIB)


def test_no_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is memory_limit(tmp_path) is None


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A node of 96 cores and no control group, outside a pod."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)), raising=False)
    monkeypatch.setattr(limits, "cpu_quota", lambda root: None)
    monkeypatch.setattr(limits, "memory_limit", lambda root: None)
    monkeypatch.delenv(limits.CPU, raising=False)
    monkeypatch.delenv(limits.MEMORY, raising=False)
    return monkeypatch


def test_one_machine_is_used_as_it_is(node: pytest.MonkeyPatch) -> None:
    assert limits.usable_cores() == 96 and limits.memory_allowed() is None
    assert pool.workers_for(10 * GIB, 1.5) == 96
    assert pool.workers_for(1 << 20, 1.5) == 1


def test_four_cpus_of_a_node_are_four(node: pytest.MonkeyPatch) -> None:
    node.setenv(limits.CPU, "4")
    assert limits.usable_cores() == 4 and pool.workers_for(10 * GIB, 1.5) == 4
    node.setattr(limits, "cpu_quota", lambda root: 2.5)
    assert limits.usable_cores() == 2
    node.setenv(limits.CPU, "500m")
    assert limits.usable_cores() == 1


def test_the_affinity_counts_too(node: pytest.MonkeyPatch) -> None:
    node.setenv(limits.CPU, "4")
    node.setattr(os, "sched_getaffinity", lambda _: {5, 7})
    assert limits.usable_cores() == 2


def test_the_workers_leave_a_fifth_of_the_memory(node: pytest.MonkeyPatch) -> None:
    node.setenv(limits.CPU, "16")
    node.setenv(limits.MEMORY, "16Gi")
    assert pool.workers_for(10 * GIB, 1.5) == 8  # 12 GiB of 12.8
    assert pool.workers_for(10 * GIB, 0.5) == 16
    node.setattr(limits, "memory_limit", lambda root: 4 * GIB)
    assert pool.workers_for(10 * GIB, 1.5) == 2


def test_a_memory_for_not_even_one_worker_is_one_line(node: pytest.MonkeyPatch) -> None:
    node.setenv(limits.MEMORY, "1536Mi")
    with refuses(UserError, match="^data.memory:"):
        pool.workers_for(10 * GIB, 1.5)
    assert pool.workers_for(1 << 20, 1.5) == 1
