"""Topology of the group: hosts, devices and their links, NUMA nodes, network interfaces, RDMA.

Interfaces that gloo uses are found from its connections, links between GPUs with the vendor's tool.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from slipstream.shared.interconnect import nccl_log
from slipstream.shared.interconnect.profile import Host, Topology
from slipstream.shared.machine.description import this_machine
from slipstream.shared.machine.limits import read_or_empty, usable_cores

T = TypeVar("T")


def gather_from_ranks(mine: T) -> list[T]:
    """Return the values of ``mine`` on all ranks, by rank."""
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def group_topology(device: torch.device) -> Topology:
    """Return the group's topology, the same on all ranks."""
    backend = dist.get_backend()
    rdma = rdma_devices()
    if backend == "nccl":
        transports, findings = nccl_log.transports_in_use(rdma)
    else:
        transports, findings = gloo_transports(), ()
    by_rank = gather_from_ranks((machine_identity(), device_name(device), this_host(rdma), transports, findings))
    ranks_of: dict[tuple[str, int, int], list[int]] = {}
    for rank, (its_machine, *_) in enumerate(by_rank):
        ranks_of.setdefault(its_machine, []).append(rank)
    return Topology(
        tuple(
            replace(by_rank[ranks[0]][2], ranks=tuple(ranks), devices=tuple(by_rank[rank][1] for rank in ranks))
            for ranks in ranks_of.values()
        ),
        tuple(dict.fromkeys(line for _, _, _, used, _ in by_rank for line in used)),
        tuple(dict.fromkeys(line for _, _, _, _, noted in by_rank for line in noted)),
    )


def machine_identity() -> tuple[str, int, int]:
    """Return values that identify the machine or pod of this process."""
    root = Path("/").stat()
    return socket.gethostname(), root.st_dev, root.st_ino


def this_host(rdma: Sequence[str]) -> Host:
    """Describe this machine, without its ranks and their devices."""
    return Host(
        ranks=(),
        cpu=this_machine().cpu,
        cores=usable_cores(),
        numa_nodes=numa_nodes(),
        interfaces=tuple(network_interfaces()),
        rdma=tuple(rdma),
        links=tuple(gpu_links()),
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().cpu


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int:
    return max(1, len(list(root.glob("node[0-9]*"))))


def network_interfaces(named: str = "") -> list[str]:
    """Return the network interfaces that are up, or those ``named`` (comma-separated), one line each."""
    wanted = [name for name in named.split(",") if name]
    lines = []
    for name, stats in sorted(psutil.net_if_stats().items()):
        if name in wanted or (not wanted and stats.isup and name != "lo" and has_address(name)):
            speed = f"{stats.speed} Mbit/s" if stats.speed > 0 else "speed unknown"
            lines.append(f"{name}: {speed}, MTU {stats.mtu}")
    return lines


def has_address(name: str) -> bool:
    addresses = psutil.net_if_addrs().get(name, [])
    return any(address.family in (socket.AF_INET, socket.AF_INET6) for address in addresses)


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return InfiniBand, RoCE and EFA devices, like ``mlx5_0: InfiniBand, 400 Gb/sec (4X NDR)``."""
    lines = []
    for device in sorted(root.glob("*")):
        driver = (device / "device/driver").resolve().name
        layer, rate = read_or_empty(device / "ports/1/link_layer"), read_or_empty(device / "ports/1/rate")
        kind = "EFA" if driver == "efa" else {"Ethernet": "RoCE"}.get(layer, layer or driver)
        lines.append(f"{device.name}: {kind}" + (f", {rate}" if rate else ""))
    return lines


def gloo_transports() -> tuple[str, ...]:
    """Return every interface over which this process has connections, like ``eth0 (10.0.0.7)``.

    The connection to the store is excluded.
    """
    store = os.environ.get("MASTER_PORT", "")
    names = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    local = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_ESTABLISHED and str(connection.raddr.port) != store
    }
    return tuple(sorted(f"{names.get(unmapped(ip), 'unknown')} ({unmapped(ip)})" for ip in local))


def unmapped(address: str) -> str:
    return address.removeprefix("::ffff:")


#: Entries of the matrix of `nvidia-smi topo -m`, by its legend.
NVIDIA = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, between host bridges",
    "SYS": "PCIe, between NUMA nodes",
}
SECONDS = 20


def gpu_links() -> list[str]:
    """Return one line per kind of link between GPUs, like ``NVLink (NV18): 28 pairs``.

    Empty without the vendor's tool.
    """
    for tool, arguments, parse in (
        ("nvidia-smi", ("topo", "-m"), nvidia_links),
        ("rocm-smi", ("--showtopotype",), amd_links),
    ):
        if not shutil.which(tool):
            continue
        try:
            output = subprocess.run(
                [tool, *arguments], capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        return [f"{kind}: {pairs} pair{'s' if pairs > 1 else ''}" for kind, pairs in parse(output).most_common()]
    return []


def matrix(text: str) -> list[list[str]]:
    """Return the cells of a ``[GPU, GPU]`` matrix, without further columns and colour codes."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    # Skips the indented heading.
    rows = [line.split()[1:] for line in lines if re.match(r"GPU\d+\s", line)]
    return [row[: len(rows)] for row in rows]


def pairs(cells: list[list[str]]) -> list[str]:
    """Return the cells above the diagonal."""
    return [cell for index, row in enumerate(cells) for cell in row[index + 1 :]]


def nvidia_links(text: str) -> Counter[str]:
    """Count the links in the output of ``nvidia-smi topo -m``."""
    return Counter(
        f"NVLink ({cell})" if cell.startswith("NV") else NVIDIA.get(cell, cell) for cell in pairs(matrix(text))
    )


def amd_links(text: str) -> Counter[str]:
    """Count the links in the output of ``rocm-smi --showtopotype``."""
    return Counter("PCIe" if cell == "PCIE" else "xGMI" if cell == "XGMI" else cell for cell in pairs(matrix(text)))
