"""Findings in a profile: slow ranks, slow links, low bandwidth.

A rank is slow if all its pairs are slow; a link is slow if only one pair is; a straggler lacks processor time. Only a
factor of two in every launch is reported: on a busy machine, pairs differ by tens of percent without a fault.

The largest all_reduce is graded against the bandwidth of the interconnect. For gloo over Ethernet that is the
interface's rate less Ethernet, IP and TCP headers. For GPUs in a node it is a published figure, valid for messages of
at least ``LARGE`` bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.shared.interconnect.profile import Measurement, NetworkProfile

FACTOR = 2.0


def slow_ranks_and_links(profile: NetworkProfile) -> tuple[str, ...]:
    held_back = find_stragglers(profile)
    found = [
        f"rank {rank} is a straggler: {why}; check its CPU (quota, neighbours, frequency), not its link"
        for rank, why in held_back.items()
    ]
    pairs = slow_pairs([pair for pair in profile.pairs if not set(pair.ranks) & held_back.keys()])
    ranks = slow_ranks(pairs, profile.fingerprint.world - len(held_back))
    for rank in ranks:
        times = max(factor for pair, factor in pairs.items() if rank in pair)
        found.append(f"rank {rank} is slow: each of its pairs takes up to {times:.1f} times as long as the others")
    for (first, second), times in pairs.items():
        if first not in ranks and second not in ranks:
            found.append(
                f"the link between ranks {first} and {second} is slow: {times:.1f} times as long as the other pairs"
            )
    return tuple(found)


def slow_pairs(pairs: Sequence[Measurement]) -> dict[tuple[int, int], float]:
    """Return the slow pairs and how many times as long they take.

    A pair is slow if it takes at least ``FACTOR`` times the median of the fastest half of all pairs, in every launch.
    The other half is ignored: one slow rank in four slows half of all pairs. A pair's fastest iteration counts: a slow
    link slows all iterations, a delayed process only some.
    """
    if len(pairs) < 3:
        return {}
    found: dict[tuple[int, int], list[float]] = {}
    for launches in zip(*(pair.launches for pair in pairs), strict=False):
        fastest = [min(launch.seconds) for launch in launches]
        usual = median(sorted(fastest)[: (len(fastest) + 1) // 2])
        for pair, seconds in zip(pairs, fastest, strict=True):
            found.setdefault((pair.ranks[0], pair.ranks[1]), []).append(seconds / usual)
    return {pair: min(factors) for pair, factors in found.items() if min(factors) >= FACTOR}


def slow_ranks(pairs: dict[tuple[int, int], float], world: int) -> list[int]:
    """Return the ranks whose pairs are all slow, not counting pairs with other slow ranks.

    Empty for fewer than three ranks.
    """
    counts = Counter(rank for pair in pairs for rank in pair)
    found: list[int] = []
    for rank, count in counts.most_common():
        if world > 2 and count >= world - 1 - len(found):
            found.append(rank)
    return sorted(found)


def find_stragglers(profile: NetworkProfile) -> dict[int, str]:
    """Return the reason for every straggler, by rank.

    A straggler takes at least ``FACTOR`` times the other ranks' median time for the same matmul, in every launch. Or it
    arrives late: in the smallest all_reduce it waits at most half as long as any other rank, in every launch.
    """
    found: dict[int, str] = {}
    if profile.fingerprint.world < 2:
        return found
    for rank in range(profile.fingerprint.world):
        factors = [
            seconds[rank] / median(other for at, other in enumerate(seconds) if at != rank)
            for seconds in profile.products
        ]
        if factors and min(factors) >= FACTOR:
            found[rank] = f"the same matmul takes {min(factors):.1f} times as long on it"
    smallest = next(iter(profile.of("all_reduce")), None)
    return found | {rank: why for rank, why in find_latecomers(smallest).items() if rank not in found}


def find_latecomers(smallest: Measurement | None) -> dict[int, str]:
    """Return the reason for every rank that the others wait for in the ``smallest`` all_reduce."""
    if smallest is None or not all(launch.by_rank for launch in smallest.launches):
        return {}
    found = {}
    for rank in range(smallest.world):
        shares = [
            launch.by_rank[rank] / min(other for at, other in enumerate(launch.by_rank) if at != rank)
            for launch in smallest.launches
        ]
        if smallest.world > 1 and max(shares) <= 1 / FACTOR:
            late = median(min(o for at, o in enumerate(each.by_rank) if at != rank) for each in smallest.launches)
            found[rank] = f"it arrives late: the others wait {late * 1e3:.2f} ms for it in each all_reduce"
    return found


LARGE = 256 << 20
#: Fractions of the expected bandwidth: "normal" from the first, "far too low" below the second.
NORMAL, FAR_TOO_LOW = 0.8, 0.5
#: Bytes per packet: IP and TCP headers with timestamps; Ethernet frame on the wire (IEEE 802.3: preamble, addresses,
#: checksum, gap).
HEADERS, FRAME = 52, 38


@dataclass(frozen=True)
class PublishedBandwidth:
    """Published busbw of a large all_reduce over eight GPUs of a node, in 1e9 bytes per second."""

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


def grade_bandwidth(profile: NetworkProfile) -> Iterator[str]:
    """Yield the grade of the largest all_reduce if its expected bandwidth is known, with advice."""
    measured = profile.of("all_reduce")
    found = expected_bandwidth(profile)
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
        yield f"check {LOOK_AT[kind]}; the pairs above show whether it is one rank, one link or all"


def expected_bandwidth(profile: NetworkProfile) -> tuple[str, float, str] | None:
    """Return the kind of interconnect, its busbw in 1e9 bytes per second, and the figure's source; None if unknown."""
    its = profile.fingerprint
    if its.backend == "gloo":
        if profile.topology.loopback:
            return None  # loopback traffic is not bound by the interface's rate
        used = {transport.partition(" ")[0] for transport in profile.topology.transports}
        rates = [
            found
            for line in its.interfaces
            if (found := ethernet_payload_rate(line)) and line.partition(":")[0] in used
        ]
        return ("Ethernet", min(rates), "its slowest interface, less headers") if rates else None
    if its.nodes == 1 and its.world == 8:
        links = " ".join(profile.topology.hosts[0].links)
        for known in PUBLISHED:
            if known.link in links and all(known.device in device for device in its.devices):
                return known.link, known.busbw, f"eight {known.device} over {known.link} ({known.source})"
    return None


def ethernet_payload_rate(line: str) -> float | None:
    """Return the payload rate of ``eth0: 10000 Mbit/s, MTU 1500`` in 1e9 bytes per second; None if unknown."""
    found = re.search(r": (\d+) Mbit/s, MTU (\d+)", line)
    if found is None:
        return None
    rate, mtu = map(int, found.groups())
    return rate * 1e6 / 8 * (mtu - HEADERS) / (mtu + FRAME) / 1e9
