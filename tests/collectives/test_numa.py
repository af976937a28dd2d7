"""Gain of NUMA binding: where it is measured, and that ranks are really bound."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.operations.proofs.processes import FORK
from slipstream.pipeline.collectives import engine
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.launch.measurements import (
    bind_threads,
    cpus_near_gpu,
    node_cpus,
    parse_cpu_list,
    reason_to_skip,
)
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.pipeline.collectives.output import results_table
from tests.support.network_profiles import network_profile

#: It compares times.
pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


def nodes_of(place: Path) -> Path:
    """Two nodes of one CPU each, of those that this process may use, and one of memory only."""
    mine = sorted(os.sched_getaffinity(0))
    for number, cpus in enumerate((f"{mine[0]}", f"{mine[-1]},9999", "")):
        (place / f"node{number}").mkdir(parents=True)
        (place / f"node{number}" / "cpulist").write_text(cpus + "\n")
    return place


def test_where_a_machine_has_one_node_it_is_left_out_with_the_reason() -> None:
    profile = network_profile(2)
    hosts = tuple(replace(host, numa_nodes=2) for host in profile.topology.hosts)
    assert reason_to_skip(replace(profile, topology=replace(profile.topology, hosts=hosts))) == ""
    one = (*hosts, replace(hosts[0], ranks=(7, 8), numa_nodes=1))
    assert reason_to_skip(replace(profile, topology=replace(profile.topology, hosts=one))) == (
        "NUMA binding: the machine of rank 7 has one NUMA node"
    )
    alone = replace(profile, fingerprint=replace(profile.fingerprint, world=1))
    assert reason_to_skip(alone) == "NUMA binding: a single process has no link"


def test_a_rank_gets_the_cpus_of_a_node_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_cpu_list("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11} and parse_cpu_list("") == set()
    mine = sorted(os.sched_getaffinity(0))
    nodes = node_cpus(nodes_of(tmp_path))
    assert nodes == [{mine[0]}, {mine[-1]}]
    for rank, node in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert cpus_near_gpu(CPU, nodes) == nodes[node]


def bound_body(cpu: int, out: Path) -> None:
    torch.mm(torch.ones(500, 500), torch.ones(500, 500))  # with threads
    bind_threads({cpu})
    found = {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}
    out.write_text(str(sorted(map(sorted, found))))


def test_all_threads_are_bound(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    process = FORK.Process(target=bound_body, args=(cpu, tmp_path / "found"), daemon=True)
    process.start()
    process.join(timeout=30)
    assert (tmp_path / "found").read_text() == f"[[{cpu}]]"


@pytest.mark.prove
def test_it_is_measured_in_turns_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "NODES", nodes_of(tmp_path))
    monkeypatch.setattr(engine, "reason_to_skip", lambda _: "")
    workers = WorkerGroup.local(2, timeout=60)
    turns = engine.numa_turns(workers, CollectivesConfig(largest=1 << 16), network_profile(2))
    assert len(turns) == engine.FEWEST_TURNS and all(free > 0 and bound > 0 for free, bound in turns)
    assert "with each rank bound to a NUMA node, the largest all_reduce: " in results_table(
        replace(network_profile(2), numa=tuple(turns))
    )
