"""Fingerprint of a process group: all that determines the expected speed of its interconnect."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.profile import Fingerprint, Host, Topology
from slipstream.shared.interconnect.topology import (
    device_name,
    gather_from_ranks,
    network_interfaces,
    rdma_devices,
    this_host,
)
from slipstream.shared.machine.limits import read_or_empty

#: Environment variable that selects network interfaces, by backend.
CHOICES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def interconnect_fingerprint(topology: Topology, device: torch.device, backend: str = "") -> Fingerprint:
    """Return the fingerprint for ``backend`` (default: the group's), the same on all ranks.

    Names and addresses of machines are not part of it.
    """
    backend = backend or dist.get_backend()
    used = {line for mine in gather_from_ranks(interfaces_for(backend)) for line in mine}
    return fingerprint_from(topology.hosts, used, device, backend)


def fingerprint_on_cpu(processes: int) -> Fingerprint:
    """Return the fingerprint of a gloo group of ``processes`` on this CPU, without creating the group."""
    cpu = torch.device("cpu")
    ranks, devices = tuple(range(processes)), (device_name(cpu),) * processes
    host = replace(this_host(rdma_devices()), ranks=ranks, devices=devices)
    return fingerprint_from([host], set(interfaces_for("gloo")), cpu, "gloo")


def interfaces_for(backend: str) -> list[str]:
    return network_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", "") if backend == "gloo" else "")


def fingerprint_from(hosts: Sequence[Host], used: set[str], device: torch.device, backend: str) -> Fingerprint:
    """Return the fingerprint; ``used`` are interfaces on any host that the backend may use."""
    lines = used | {line for host in hosts for line in (*host.rdma, *host.links)}
    cores = {rank: host.cores for host in hosts for rank in host.ranks}
    by_rank = {rank: name for host in hosts for rank, name in zip(host.ranks, host.devices, strict=True)}
    devices = [f"{by_rank[rank]}, {cores[rank]} cores" for rank in sorted(by_rank)]
    return Fingerprint(
        world=len(by_rank),
        nodes=len(hosts),
        backend=backend,
        devices=tuple(devices),
        interfaces=tuple(sorted(lines)),
        driver=driver_of(device),
        libraries=library_versions(backend),
    )


def library_versions(backend: str) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    if backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def driver_of(device: torch.device) -> str:
    """Return the version of the GPU driver, or of Linux if its kernel does the networking."""
    if device.type == "cuda":
        versions = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
        return next((version for path in versions if (version := read_or_empty(path))), "unknown")
    return f"Linux {'.'.join(platform.release().split('.')[:2])}"


def refuse_unknown_interfaces(environment: Mapping[str, str]) -> None:
    """Raise ``UserError`` if ``environment`` sets gloo or NCCL to an interface that this machine lacks."""
    present = sorted(path.name for path in Path("/sys/class/net").glob("*"))
    for variable in CHOICES.values():
        chosen = environment.get(variable, "")
        exact = variable == CHOICES["gloo"] or chosen.startswith("=")
        if chosen.startswith("^"):
            continue
        for name in filter(None, re.split(",", chosen.removeprefix("="))):
            exists = name in present if exact else any(there.startswith(name.partition(":")[0]) for there in present)
            if present and not exists:
                raise UserError(
                    f"{variable}={chosen}: this machine has no interface {name!r}; it has {', '.join(present)}"
                )
