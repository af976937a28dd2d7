"""Transports that NCCL or RCCL uses, from its log (``NCCL_DEBUG=INFO``), their only source."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

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
