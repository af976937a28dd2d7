"""Network profile: measured speed of collectives between the processes of a group (``profile.json``).

A profile keeps the times of all iterations, so that profiles can be compared by any statistic. Sizes and bandwidths
follow nccl-tests (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, canonical_json
from slipstream.shared.artifacts.records import read_record, write_record

KIND = "collectives"
FILE = "profile.json"
#: Readable forms next to the profile: a table with the columns of nccl-tests, and a spreadsheet.
TABLE, CSV = "profile.txt", "profile.csv"
#: Largest all_reduce of earlier profiles of the same fingerprint: a list of :class:`TrendPoint`.
COURSE = "course.json"
#: Modelled all_reduce times by size: a list of :class:`ModelPoint`.
MODEL = "model.json"
#: Version of the measurement method: profiles of different versions are not compared.
METHOD = 2
#: Minimum number of iterations beyond a percentile for it to be quoted.
BEYOND = 10
#: "loop": iterations follow one another; "barrier": each starts after a barrier, and includes the skew with which ranks
#: leave it.
Mode = Literal["loop", "barrier"]

#: busbw / algbw is this factor times (world - 1) / world; 1.0 for operations that are not listed.
LINK_SHARES = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_to_allv": 1,
    "gather": 1,
    "scatter": 1,
}


@dataclass(frozen=True)
class Launch:
    """Times of one case in one launch (process group)."""

    #: Seconds of every iteration: the longest over the ranks, by their own clocks. In mode "loop" on a GPU, an
    #: iteration is the mean of the calls between two clock readings.
    seconds: tuple[float, ...]
    #: True if the median was known precisely enough, False if the time was over first.
    narrow: bool = True
    #: Median seconds of each rank's own iterations: a late rank waits less than the others.
    by_rank: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True)
class Measurement:
    """One case, measured in one or more launches: an operation on one size and data type, in one mode."""

    operation: str
    #: "float32", "bfloat16", ...; "" for a barrier, which moves no data.
    dtype: str
    #: "sum", "avg" or "max"; "" for operations that reduce nothing.
    reduction: str
    #: Size as nccl-tests defines it: one rank's buffer, or all ranks' data together for all_gather, reduce_scatter,
    #: all_to_all, gather and scatter; for all_to_allv the most that a rank sends or receives.
    bytes: int
    #: Number of participating processes.
    world: int
    mode: Mode
    in_place: bool
    launches: tuple[Launch, ...]
    #: Operations started before the first is waited for; an iteration lasts until all have ended.
    in_flight: int = 1
    #: Participating ranks; empty for all ranks of the group.
    ranks: tuple[int, ...] = ()

    @property
    def iterations(self) -> int:
        return sum(len(launch.seconds) for launch in self.launches)

    def percentile(self, percent: float) -> float | None:
        """Return a percentile of the iterations in seconds; launches have equal weight.

        None if fewer than ``BEYOND`` iterations lie beyond it, except for the median.
        """
        beyond = self.iterations * min(percent, 100 - percent) / 100
        return None if percent != 50 and beyond < BEYOND else self._quantile(percent / 100)

    @property
    def p50(self) -> float:
        """Median seconds over all iterations, with equal weight of all launches."""
        return self._quantile(0.5)

    def _quantile(self, share: float) -> float:
        values = np.concatenate([launch.seconds for launch in self.launches])
        weights = np.concatenate([np.full(len(launch.seconds), 1 / len(launch.seconds)) for launch in self.launches])
        return float(np.quantile(values, share, weights=weights, method="inverted_cdf"))

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the median in seconds; None for fewer than 3 launches.

        It comes from the spread between launches (Student's t over logarithms).
        """
        if len(self.launches) < 3:
            return None
        from scipy.stats import t

        logs = np.log([launch.median for launch in self.launches])
        half = float(t.ppf(0.975, len(logs) - 1)) * float(logs.std(ddof=1)) / len(logs) ** 0.5
        return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))

    def algbw(self, seconds: float | None = None) -> float:
        """Return algorithm bandwidth in 1e9 bytes per second, at the median or at ``seconds`` per iteration."""
        return self.bytes * self.in_flight / (self.p50 if seconds is None else seconds) / 1e9

    def busbw(self, seconds: float | None = None) -> float:
        """Return bus bandwidth in 1e9 bytes per second; 0 for a single process, which uses no link."""
        return self.algbw(seconds) * bus_factor(self.operation, self.world)


@dataclass(frozen=True)
class Overlap:
    """Overlap of a collective with a matmul of the same duration."""

    operation: str
    dtype: str
    bytes: int
    world: int
    #: Seconds of every turn, the longest over the ranks: (collective alone, matmul alone, both together).
    turns: tuple[tuple[float, float, float], ...]

    @property
    def hidden(self) -> float:
        """Hidden fraction of the shorter operation, all_reduce or matmul: the median over the turns.

        Negative if both together take longer than one after the other.
        """
        return float(np.median([(alone + product - both) / min(alone, product) for alone, product, both in self.turns]))

    def __str__(self) -> str:
        what, matmul = f"{self.operation} of {self.bytes} bytes", "a matmul that takes as long"
        if self.hidden <= 0:
            return f"nothing of {what} is hidden by {matmul}: both at once take longer than one after the other"
        return f"{self.hidden:.0%} of {what} is hidden by {matmul}"


@dataclass(frozen=True)
class Fingerprint:
    """All that determines the expected speed; profiles with equal fingerprints are comparable."""

    world: int
    nodes: int
    backend: str
    #: Name of every rank's GPU or CPU, with its cores.
    devices: tuple[str, ...]
    #: Distinct interfaces of all nodes that the backend may use: name, speed and kind.
    interfaces: tuple[str, ...]
    driver: str
    #: Versions of torch and of the backend.
    libraries: dict[str, str]
    method: int = METHOD

    @property
    def digest(self) -> str:
        """Name in the history: 16 hex digits."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()[:16]


@dataclass(frozen=True)
class Host:
    """One machine or pod as its ranks see it."""

    ranks: tuple[int, ...]
    cpu: str
    cores: int
    numa_nodes: int
    #: Names of its ranks' devices.
    devices: tuple[str, ...] = ()
    #: Links between its GPUs ("NVLink (NV18): 28 pairs"), one line per kind.
    links: tuple[str, ...] = ()
    #: Network interfaces, RDMA and EFA devices, one line each.
    interfaces: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topology:
    """Hosts of the group, and the transports that the backend uses between them."""

    hosts: tuple[Host, ...]
    #: "eth0 (10.0.0.7)" for gloo, "NET/OFI", "NET/IB", "NET/Socket" or "P2P/CUMEM" for NCCL; one line each.
    transports: tuple[str, ...] = ()
    #: Findings, such as a fall-back to sockets.
    findings: tuple[str, ...] = ()

    @property
    def loopback(self) -> bool:
        """True if gloo's messages never leave the machine.

        Messages to a machine's own addresses take loopback, whichever interface has the address. Network namespaces
        (pods) of one machine are recognised by differently named interfaces.
        """
        ends = [re.fullmatch(r"(\S+) \(\S+\)", line) for line in self.transports]
        names = [end[1] for end in ends if end]
        return len(self.hosts) == 1 and bool(names) and len(set(names)) == len(ends)


@dataclass(frozen=True)
class TrendPoint:
    """Largest all_reduce of a profile.

    ``busbw`` is in 1e9 bytes per second at the median; ``low`` and ``high`` are the bounds of its interval, None for
    fewer than 3 launches.
    """

    measured_at: float
    bytes: int
    busbw: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ModelPoint:
    """Modelled all_reduce of one size: seconds, and the interval expected for another launch's median."""

    bytes: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class NetworkProfile:
    """Contents of ``profile.json``."""

    REMEDY: ClassVar = "measure again"
    fingerprint: Fingerprint
    #: Time of the measurement, seconds since 1970, UTC.
    measured_at: float
    measurements: tuple[Measurement, ...]
    topology: Topology
    #: Measurements of send_recv between one pair of ranks (``ranks``) at a time, while the others are idle.
    pairs: tuple[Measurement, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    #: Per launch, every rank's seconds for the same matmul, to find ranks short of processor time.
    products: tuple[tuple[float, ...], ...] = ()
    #: Per turn, seconds of the largest all_reduce: (ranks unbound, each rank bound to a NUMA node).
    numa: tuple[tuple[float, float], ...] = ()
    #: Comparisons with other installed benchmarks, one line each.
    beside: tuple[str, ...] = ()
    #: True if only the collectives of training were measured, at few sizes, as in the main job on one machine.
    short: bool = False
    #: True if a comparison found that it is, or may be, slower than earlier ones; later comparisons do not use it.
    doubtful: bool = False
    #: Requested measurements that were skipped, and why.
    left_out: tuple[str, ...] = ()
    #: Settings of the measurement, from the configuration's section "collectives".
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        return max((len(m.launches) for m in self.measurements), default=0)

    def of(self, operation: str, mode: Mode = "loop", world: int = 0) -> list[Measurement]:
        """Return an operation's float32 sum measurements with one in flight, by size.

        Measurements out of place are preferred. ``world`` is the number of processes (0: all).
        """
        world = world or self.fingerprint.world
        alike = [
            m
            for m in self.measurements
            if (m.operation, m.mode, m.in_flight, m.world) == (operation, mode, 1, world)
            and m.dtype in ("float32", "")
            and m.reduction in ("sum", "")
        ]
        by_size = {m.bytes: m for m in sorted(alike, key=lambda m: not m.in_place)}
        return [by_size[size] for size in sorted(by_size)]


def bus_factor(operation: str, world: int) -> float:
    """Return busbw / algbw (nccl-tests, doc/PERFORMANCE.md); 0 for a single process."""
    if world == 1:
        return 0.0
    return LINK_SHARES[operation] * (world - 1) / world if operation in LINK_SHARES else 1.0


def merge_profiles(profiles: Sequence[NetworkProfile]) -> NetworkProfile:
    """Return the profiles of several launches of one group as one profile.

    Measurements of the same case become one, with the launches of all profiles. Fields without measurements come from
    the first profile.
    """
    turns: dict[Overlap, tuple[tuple[float, float, float], ...]] = {}
    for overlap in (each for profile in profiles for each in profile.overlaps):
        case = replace(overlap, turns=())
        turns[case] = (*turns.get(case, ()), *overlap.turns)
    return replace(
        profiles[0],
        measurements=by_case(m for profile in profiles for m in profile.measurements),
        pairs=by_case(m for profile in profiles for m in profile.pairs),
        overlaps=tuple(replace(case, turns=all_turns) for case, all_turns in turns.items()),
        products=tuple(product for profile in profiles for product in profile.products),
    )


def by_case(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Combine measurements of the same case into one, with all their launches."""
    launches: dict[Measurement, tuple[Launch, ...]] = {}
    for each in measurements:
        case = replace(each, launches=())
        launches[case] = (*launches.get(case, ()), *each.launches)
    return tuple(replace(case, launches=all_launches) for case, all_launches in launches.items())


def write_profile(
    directory: Path, profile: NetworkProfile, made_by: Mapping[str, object], beside: Mapping[str, bytes] | None = None
) -> Artifact:
    """Write the profile and the additional files ``beside`` as an artifact into the fresh ``directory``."""
    writer = ArtifactWriter(directory)
    write_record(writer, FILE, profile)
    for name, content in (beside or {}).items():
        writer.write_bytes(name, content)
    return writer.finish(KIND, made_by)


def read_profile(directory: Path) -> NetworkProfile:
    """Read a network profile.

    Raises ``DamagedArtifact`` if ``directory`` holds no complete profile; its readable forms may be missing.
    """
    return read_record(Artifact.open(directory, KIND, only=[FILE]), FILE, NetworkProfile)
