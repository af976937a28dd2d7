"""A sampler as a process of its own, and readings to write and show."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from slipstream.shared.telemetry.metrics import MetricLabels
from slipstream.shared.telemetry.records import PHASES, STEP_BOUNDS, DeviceReading, HostReading, RankTotals, Sample

LABELS = MetricLabels("f1a2", "train", 1, "node-7")
NAMED = [f"--{name}={value}" for name, value in vars(LABELS).items()]


@contextmanager
def sampling(
    directory: Path, environment: Mapping[str, str] = os.environ, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """The sampler as a child of this process; killed in the end, if it has not ended."""
    command = [sys.executable, "-m", "slipstream.shared.telemetry.sampler", f"--parent={os.getpid()}", *NAMED, *options]
    process = subprocess.Popen([*command, str(directory)], env=dict(environment), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until the condition holds. Fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.02)


def device(uuid: str = "GPU-0", index: int = 0, busy: float | None = 0.5, joules: float | None = 1000) -> DeviceReading:
    """Return a reading with every field; a file of samples holds its numbers exactly."""
    return DeviceReading(
        uuid,
        index,
        'A "100"',
        busy=busy,
        sm_active=0.25,
        memory_used_bytes=20_000_000_001,
        memory_limit_bytes=80_000_000_000,
        power_watts=350.5,
        energy_joules=joules,
        temperature_celsius=61.0,
        sm_clock_hertz=1.75e9,
        throttled=("sw_power_cap", "hw_thermal_slowdown"),
        io_bytes={("pcie", "in"): 1e12, ("nvlink", "out"): 3.0},
    )


def sample(at: float, *devices: DeviceReading) -> Sample:
    return Sample(at, HostReading(at / 2, 4, at / 8, 1.5, 3, 40, 5_000_000_001, 16_000_000_000), devices)


def totals(rank: int = 0, steps: int = 20) -> RankTotals:
    """Of a rank on a GPU whose steps have all taken 0.15 s."""
    phases = dict.fromkeys(PHASES, 0.03 * steps)
    within = [steps if bound >= 0.2 else 0 for bound in STEP_BOUNDS]
    return RankTotals(rank, f"GPU-{rank}", steps, 64 * steps, phases, within, 1.7e9, 0.75, {"data": 0.25})
