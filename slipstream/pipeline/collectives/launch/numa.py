"""Benefit of binding ranks to NUMA nodes.

The largest all_reduce is timed in fresh processes, alternately without and with binding. Skipped unless every machine
has at least two NUMA nodes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.launch.measurements import ALL_REDUCE, measure_case
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.shared.interconnect.profile import NetworkProfile
from slipstream.shared.machine.limits import read_or_empty

NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def reason_to_skip(profile: NetworkProfile) -> str:
    """Return why NUMA binding cannot be measured; "" if it can."""
    if profile.fingerprint.world == 1:
        return "NUMA binding: a single process has no link"
    single = [host.ranks[0] for host in profile.topology.hosts if host.numa_nodes < 2]
    return f"NUMA binding: the machine of rank {single[0]} has one NUMA node" if single else ""


def all_reduce_bound(worker: WorkerContext, config: CollectivesConfig, bind: bool, nodes: str) -> float:
    """Return the median seconds of the largest all_reduce.

    With ``bind``, this rank is bound to a NUMA node from the directory ``nodes``.
    """
    if bind:
        bind_threads(cpus_near_gpu(worker.device, node_cpus(Path(nodes))))
    return measure_case(worker, ALL_REDUCE, config.largest, "loop", config.budget).p50


def node_cpus(root: Path) -> list[set[int]]:
    """Return this process's CPUs on every NUMA node that has any.

    Reads Linux's directory ``root``, which other systems lack.
    """
    allowed = os.sched_getaffinity(0)
    nodes = sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    return [mine for path in nodes if (mine := parse_cpu_list(read_or_empty(path / "cpulist")) & allowed)]


def parse_cpu_list(ranges: str) -> set[int]:
    """Parse a CPU list of the kernel, such as ``0-3,8``."""
    pairs = [part.partition("-") for part in ranges.split(",") if part]
    return {number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)}


def cpus_near_gpu(device: torch.device, nodes: Sequence[set[int]]) -> set[int]:
    """Return the CPUs of the NUMA node of this rank's GPU; if unknown, local ranks take nodes in turn."""
    if device.type == "cuda":
        its: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack the PCI address
        address = f"{its.pci_domain_id:04x}:{its.pci_bus_id:02x}:{its.pci_device_id:02x}.0"
        known = read_or_empty(PCI / address / "numa_node")
        if known.isdigit() and int(known) < len(nodes):
            return nodes[int(known)]
    return nodes[int(os.environ.get("LOCAL_RANK", "0")) % len(nodes)]


def bind_threads(cpus: set[int]) -> None:
    """Bind every thread of this process, because the backend's threads are already running."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)
