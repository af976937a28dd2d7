"""The network profile, as the benchmark writes it and others read it.

``profile.json`` holds ``world`` (processes), ``nodes``, ``backend``, ``device``, ``torch`` (its version),
``measurements`` and ``summary``. A measurement has ``operation``, ``bytes`` (by the conventions of
:mod:`tasks.collectives.operations`), ``iterations``, ``p10_us``, ``p50_us``, ``p99_us`` (microseconds an iteration),
``algbw_gbps`` and ``busbw_gbps`` (at the median; 1e9 bytes a second; busbw is 0 for one process, which has no link) and
``correct``. The summary has ``all_reduce_latency_us`` (median, smallest size) and ``all_reduce_busbw_gbps`` (largest
size), both null if all_reduce was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts.format import Artifact, ArtifactWriter

KIND = "collectives"
FILE = "profile.json"


def write_profile(directory: Path, profile: Mapping[str, Any], made_by: Mapping[str, Any]) -> Artifact:
    """Write the artifact."""
    writer = ArtifactWriter(directory)
    writer.write_json(FILE, profile)
    return writer.finish(KIND, made_by)


def read_profile(directory: Path) -> dict[str, Any]:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole network profile."""
    return Artifact.open(directory, KIND).read_json(FILE)
