"""The group as its ranks see it: hosts, devices and how they are linked, NUMA nodes, network interfaces, RDMA."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from slipstream.interconnect import gloo_sockets, gpu_links, nccl_log
from slipstream.interconnect.profile import Host, Topology
from slipstream.machine.description import this_machine
from slipstream.machine.limits import read, usable_cores


def gather_from_ranks(mine: Any) -> list[Any]:
    """What each rank has, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def topology_of(device: torch.device) -> Topology:
    """The same on all ranks."""
    backend = dist.get_backend()
    rdma = rdma_devices()
    if backend == "nccl":
        transports, findings = nccl_log.transports_in_use(rdma)
    else:
        transports, findings = gloo_sockets.transports_in_use(), ()
    by_rank = gather_from_ranks((machine(), device_name(device), this_host(rdma), transports, findings))
    hosts: dict[Any, list[int]] = {}
    for rank, (place, *_) in enumerate(by_rank):
        hosts.setdefault(place, []).append(rank)
    return Topology(
        tuple(
            Host(ranks=tuple(ranks), devices=tuple(by_rank[rank][1] for rank in ranks), **by_rank[ranks[0]][2])
            for ranks in hosts.values()
        ),
        tuple(dict.fromkeys(line for *_, found, _ in by_rank for line in found)),
        tuple(dict.fromkeys(line for *_, found in by_rank for line in found)),
    )


def machine() -> tuple[str, int, int]:
    """What is the same for two processes of a machine or pod."""
    root = Path("/").stat()
    return socket.gethostname(), root.st_dev, root.st_ino


def this_host(rdma: Sequence[str]) -> dict[str, Any]:
    """What :class:`Host` says of this machine, but for its ranks."""
    return {
        "cpu": this_machine().cpu,
        "cores": usable_cores(),
        "numa_nodes": numa_nodes(),
        "interfaces": tuple(interfaces()),
        "rdma": tuple(rdma),
        "links": tuple(gpu_links.links()),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else this_machine().cpu


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int:
    return max(1, len(list(root.glob("node[0-9]*"))))


def interfaces(named: str = "") -> list[str]:
    """The network interfaces that are up, or those ``named`` (by comma), one line each."""
    wanted = [name for name in named.split(",") if name]
    found = []
    for name, stats in sorted(psutil.net_if_stats().items()):
        if name in wanted or (not wanted and stats.isup and name != "lo" and has_address(name)):
            speed = f"{stats.speed} Mbit/s" if stats.speed > 0 else "speed unknown"
            found.append(f"{name}: {speed}, MTU {stats.mtu}")
    return found


def has_address(name: str) -> bool:
    addresses = psutil.net_if_addrs().get(name, [])
    return any(address.family in (socket.AF_INET, socket.AF_INET6) for address in addresses)


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """InfiniBand, RoCE and EFA devices, one line each: ``mlx5_0: InfiniBand, 400 Gb/sec (4X NDR)``."""
    found = []
    for device in sorted(root.glob("*")):
        driver = (device / "device/driver").resolve().name
        layer, rate = read(device / "ports/1/link_layer"), read(device / "ports/1/rate")
        kind = "EFA" if driver == "efa" else {"Ethernet": "RoCE"}.get(layer, layer or driver)
        found.append(f"{device.name}: {kind}" + (f", {rate}" if rate else ""))
    return found
