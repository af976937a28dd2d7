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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

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
        transports, findings = transports_in_use(rdma)
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


#: Variable with the log's path, in which NCCL replaces %h by the host and %p by the process.
FILE = "NCCL_DEBUG_FILE"
#: "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "[send] via NET/AWS Libfabric/0/GDRDMA",
#: "NCCL INFO Channel 00 : 1[53d000] -> 0[50000] [receive] via NET/Socket/0"
CHANNEL = re.compile(r"NCCL INFO Channel \S+(?: :)? .*?\bvia (?P<via>.+?)\s*$")
#: "NCCL INFO Using network Socket", "NCCL INFO Using network AWS Libfabric"
NETWORK = re.compile(r"NCCL INFO (?:\S+ )?Using network (?P<network>.+?)\s*$")
#: "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>", "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.7<0>"
DEVICES = re.compile(r"NCCL INFO NET/(?P<net>\w+) ?: Using (?P<devices>\[0\].+?)\s*$")
#: "NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)"
PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (?P<provider>[\w;-]+)")
BETWEEN_HOSTS = "NET/"


def nccl_log_environment(directory: str, present: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make NCCL log into ``directory``, except those ``present`` already."""
    chosen = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH", FILE: f"{directory}/nccl-%h-%p.log"}
    return {name: value for name, value in chosen.items() if name not in present}


def transports_in_use(rdma: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the transports of this process and findings, if it has a log."""
    pattern = os.environ.get(FILE, "")
    if "%p" not in pattern:
        return (), ()
    path = Path(pattern)
    logs = path.parent.glob(path.name.replace("%h", "*").replace("%p", str(os.getpid())))
    transports = parse_nccl_log("\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs))
    return transports, transport_fallbacks(transports, rdma)


def parse_nccl_log(log: str) -> tuple[str, ...]:
    """Return the transports between GPUs and between hosts, one line each, as NCCL names them."""
    transports: list[str] = []
    for line in log.splitlines():
        if match := CHANNEL.search(line):
            # NET/Socket/0 and NET/Socket/1 are channels of the same transport; GDRDMA is kept.
            transports.append(re.sub(r"/\d+(?=/|$)", "", match["via"]).removesuffix("/Shared"))
        elif match := NETWORK.search(line):
            transports.append(f"network {match['network']}")
        elif match := DEVICES.search(line):
            transports.append(f"NET/{match['net']} on {match['devices']}")
        elif match := PROVIDER.search(line):
            transports.append(f"libfabric provider {match['provider']}")
    return tuple(dict.fromkeys(transports))


def transport_fallbacks(transports: Sequence[str], rdma: Sequence[str]) -> tuple[str, ...]:
    """Return findings: sockets despite EFA, InfiniBand or RoCE; RDMA through host memory."""
    findings = []
    devices = ", ".join(rdma)
    sockets = "network Socket" in transports or any(line.startswith("NET/Socket") for line in transports)
    if sockets and any("EFA" in line for line in rdma):
        findings.append(
            f"NCCL FELL BACK TO SOCKETS although there is EFA ({devices}): the aws-ofi-nccl plugin or libfabric is "
            "missing in the image, or the pod was given no vpc.amazonaws.com/efa"
        )
    elif sockets and rdma:
        findings.append(
            f"NCCL FELL BACK TO SOCKETS although there is RDMA ({devices}): check NCCL_IB_DISABLE, NCCL_IB_HCA, the "
            "pod's RDMA resource and its locked memory"
        )
    if any("libfabric provider" in line and "efa" not in line for line in transports) and "EFA" in devices:
        findings.append("libfabric did not choose the provider efa: check FI_PROVIDER and the EFA installer")
    remote = [line for line in transports if line.startswith(BETWEEN_HOSTS) and " on " not in line]
    if remote and not sockets and not any("GDRDMA" in line for line in remote):
        findings.append("RDMA goes through the host's memory (no GDRDMA): is nvidia-peermem loaded, and DMA-BUF there?")
    return tuple(findings)
