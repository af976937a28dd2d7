"""Is this bandwidth normal? Against what interconnects of this kind are known to reach, and what to look at if not.

For an Ethernet that gloo really uses, the bound is arithmetic: its rate, less frames, IP and TCP. For GPUs in a node it
is what others published. Only the largest all_reduce is graded, and for GPUs only from ``LARGE`` bytes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.interconnect.profile import NetworkProfile

LARGE = 256 << 20
#: Shares of the expected bandwidth: from the first on it is normal, below the second far too low.
NORMAL, FAR_TOO_LOW = 0.8, 0.5
#: Bytes of a packet that are IP's and TCP's with timestamps, and those of a frame around it on the wire (IEEE 802.3:
#: preamble, addresses, checksum, gap).
HEADERS, FRAME = 52, 38


@dataclass(frozen=True)
class PublishedBandwidth:
    """What eight GPUs of a node were seen to reach: busbw of a large all_reduce, in 1e9 bytes a second."""

    device: str
    link: str
    busbw: float
    source: str


ALAYA = "https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests"
PUBLISHED = (
    PublishedBandwidth("H100", "NVLink", 460, ALAYA),
    PublishedBandwidth("A100", "NVLink", 230, ALAYA),
    PublishedBandwidth("H100", "PCIe", 35, ALAYA),
)
LOOK_AT = {
    "NVLink": "nvidia-smi nvlink -s (a lane that is down), and NCCL_P2P_DISABLE or NCCL_P2P_LEVEL in the environment",
    "PCIe": "nvidia-smi topo -m (GPUs below different root ports), and PCIe access control (ACS) in the BIOS",
    "Ethernet": "other traffic on the link, a switch or a quota of the cloud between the machines, and the MTU",
}


def grade(profile: NetworkProfile) -> Iterator[str]:
    """One line if there is something to compare with, and another on what to look at."""
    measured = profile.of("all_reduce")
    found = expected(profile)
    if found is None or not measured:
        return
    kind, busbw, source = found
    largest = measured[-1]
    if kind != "Ethernet" and largest.bytes < LARGE:
        yield f"not graded: set collectives.largest to {LARGE} or more, as {kind} reaches its bandwidth only there"
        return
    share = largest.busbw() / busbw
    word = "normal" if share >= NORMAL else "far too low" if share < FAR_TOO_LOW else "low"
    yield f"{word}: all_reduce at {largest.bytes} bytes reaches {share:.0%} of the {busbw:.3g} GB/s of {source}"
    if share < NORMAL:
        yield f"look at {LOOK_AT[kind]}; the pairs above show whether it is one rank, one link or all"


def expected(profile: NetworkProfile) -> tuple[str, float, str] | None:
    """The kind of interconnect, its bus bandwidth in 1e9 bytes a second, and where that is from."""
    its = profile.fingerprint
    if its.backend == "gloo":
        if profile.topology.loopback:
            return None  # the interface's rate is no bound of what never leaves the machine
        used = {transport.partition(" ")[0] for transport in profile.topology.transports}
        rates = [found for line in its.interfaces if (found := ethernet(line)) and line.partition(":")[0] in used]
        return ("Ethernet", min(rates), "its slowest interface, less headers") if rates else None
    if its.nodes == 1 and its.world == 8:
        links = " ".join(profile.topology.hosts[0].links)
        for known in PUBLISHED:
            if known.link in links and all(known.device in device for device in its.devices):
                return known.link, known.busbw, f"eight {known.device} over {known.link} ({known.source})"
    return None


def ethernet(line: str) -> float | None:
    """Payload in 1e9 bytes a second of ``eth0: 10000 Mbit/s, MTU 1500``; None if the speed is unknown."""
    found = re.search(r": (\d+) Mbit/s, MTU (\d+)", line)
    if found is None:
        return None
    rate, mtu = map(int, found.groups())
    return rate * 1e6 / 8 * (mtu - HEADERS) / (mtu + FRAME) / 1e9
