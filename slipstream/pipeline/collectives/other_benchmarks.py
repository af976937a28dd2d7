"""Comparison with installed nccl-tests, rccl-tests and OSU micro-benchmarks on the same machine.

They measure the same operations with independent code. A large difference means that one measurement was disturbed or
used another transport.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.shared.interconnect.profile import NetworkProfile
from slipstream.shared.logs import logger

LOG = logger("collectives")
SECONDS = 120
#: Binaries by operation. rccl-tests uses the names of nccl-tests.
PERF = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "broadcast": "broadcast_perf",
    "reduce": "reduce_perf",
    "all_to_all": "alltoall_perf",
    "send_recv": "sendrecv_perf",
}
OSU = {
    "all_reduce": "osu_allreduce",
    "broadcast": "osu_bcast",
    "reduce": "osu_reduce",
}


@dataclass(frozen=True)
class OtherBenchmark:
    """Command that measures one operation; ``read`` parses its output to seconds by bytes."""

    name: str
    operation: str
    command: tuple[str, ...]
    read: Callable[[str], dict[int, float]]


def compare_with_installed(profile: NetworkProfile, config: CollectivesConfig) -> tuple[str, ...]:
    """Return one line per operation and size that an installed benchmark also measures.

    Empty for a single process, and across machines, where they need another launcher.
    """
    if profile.fingerprint.nodes > 1 or profile.fingerprint.world == 1:
        return ()
    lines: list[str] = []
    for other in installed_benchmarks(profile.fingerprint.backend, profile.fingerprint.world, config):
        LOG.info("comparison starts: %s", " ".join(other.command))
        try:
            ended = subprocess.run(
                other.command, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            lines.append(f"{other.name} {other.operation}: {type(error).__name__} after at most {SECONDS} s")
            continue
        theirs = other.read(ended.stdout)
        if ended.returncode or not theirs:
            why = next(iter((ended.stderr or ended.stdout).strip().splitlines()), "no output")
            lines.append(f"{other.name} {other.operation}: exit code {ended.returncode}: {why}")
        lines += differences(other, theirs, profile)
    return tuple(lines)


def installed_benchmarks(backend: str, world: int, config: CollectivesConfig) -> list[OtherBenchmark]:
    """Return the installed benchmarks: nccl-tests for the backend "nccl", else OSU's (with mpirun)."""
    first, last, step = config.smallest, config.largest, config.factor
    if backend == "nccl":
        sizes = ("-b", str(first), "-e", str(last), "-f", str(step), "-g", str(world), "-d", "float")
        return [
            OtherBenchmark("nccl-tests", operation, (path, *sizes), read_nccl_tests)
            for operation, name in PERF.items()
            if operation in config.operations and (path := shutil.which(name))
        ]
    launcher = shutil.which("mpirun")
    return [
        OtherBenchmark("OSU", operation, (launcher, "-np", str(world), path, "-m", f"{first}:{last}"), read_osu)
        for operation, name in OSU.items()
        if launcher and operation in config.operations and (path := shutil.which(name))
    ]


def read_nccl_tests(text: str) -> dict[int, float]:
    """Return out-of-place seconds by bytes.

    Parses lines like ``1048576  262144  float  sum  -1  42.12  24.90  43.57  0 …``, with µs after the root.
    """
    line = re.compile(r"\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s")
    return {int(m[1]): float(m[2]) / 1e6 for m in map(line.match, text.splitlines()) if m}


def read_osu(text: str) -> dict[int, float]:
    """Return the mean latency in seconds by bytes from lines like ``1048576  812.33`` (microseconds)."""
    line = re.compile(r"(\d+)\s+([\d.]+)\s*")
    return {int(m[1]): float(m[2]) / 1e6 for m in map(line.match, text.splitlines()) if m}


def differences(other: OtherBenchmark, theirs: dict[int, float], profile: NetworkProfile) -> list[str]:
    """Return a line with both times for every size that both benchmarks measured."""
    return [
        f"{other.name} {m.operation} of {m.bytes} bytes: {theirs[m.bytes] * 1e6:.1f} us, ours {m.p50 * 1e6:.1f} us "
        f"({100 * (m.p50 / theirs[m.bytes] - 1):+.0f} %)"
        for m in profile.of(other.operation)
        if theirs.get(m.bytes)
    ]
