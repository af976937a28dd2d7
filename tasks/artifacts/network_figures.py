"""The network profile: how fast collective operations are between the processes of a group (``profile.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from tasks.artifacts.format import Artifact, ArtifactWriter

KIND = "collectives"
FILE = "profile.json"


class Measurement(TypedDict):
    """One operation at one size. ``bytes`` follows the conventions of nccl-tests, see
    :mod:`tasks.collectives.operations`."""

    operation: str
    bytes: int
    iterations: int
    #: Microseconds per iteration.
    p10_us: float
    p50_us: float
    p99_us: float
    #: 1e9 bytes per second at the median. The bus bandwidth is 0 for a single process, which has no link.
    algbw_gbps: float
    busbw_gbps: float
    correct: bool


class NetworkSummary(TypedDict):
    """all_reduce: the median latency at the smallest size, the bus bandwidth at the largest; None if not measured."""

    all_reduce_latency_us: float | None
    all_reduce_busbw_gbps: float | None


class NetworkProfile(TypedDict):
    """The contents of ``profile.json``."""

    #: Number of processes.
    world: int
    nodes: int
    backend: str
    device: str
    #: torch's version.
    torch: str
    measurements: list[Measurement]
    summary: NetworkSummary


def write_profile(directory: Path, profile: NetworkProfile, made_by: Mapping[str, Any]) -> Artifact:
    """Write the artifact into the fresh ``directory``."""
    writer = ArtifactWriter(directory)
    writer.write_json(FILE, profile)
    return writer.finish(KIND, made_by)


def read_profile(directory: Path) -> NetworkProfile:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole network profile."""
    return Artifact.open(directory, KIND).read_json(FILE)
