"""Periodic samples of a pod, kept in a directory."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.shared.logs import logger
from slipstream.shared.machine.limits import (
    cpu_seconds,
    cpu_throttling,
    group_cpus,
    memory_limit,
    memory_used,
    parse_counters,
    read_or_empty,
)
from slipstream.shared.machine.nvml import named_devices
from slipstream.shared.telemetry.records import DeviceReading, HostReading, Sample
from slipstream.shared.telemetry.ring import SampleRing
from slipstream.shared.telemetry.sampler.nvml import NvidiaDevices
from slipstream.shared.telemetry.totals import NodeCounter, NodeTotals, write_node

ROOT = Path("/")
#: Seconds between reads of the limits, which hardly change.
LIMITS_S = 60.0
#: Maximum fraction of a processor for counting waits; with thousands of threads they are counted less often.
SHARE = 0.001
#: Columns of /proc/stat that count as busy: all but "idle", "iowait" and guests, which "user" includes.
WORKING = (0, 1, 2, 5, 6, 7)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class HostUsage:
    """Reader of the pod's usage; waits are those of descendants of the process ``watched``."""

    def __init__(self, watched: int, root: Path = ROOT) -> None:
        self._root = root
        self._waits = CpuWaits(watched, root)
        self._limits_at = -LIMITS_S
        self._cpus: float = 0.0
        self._memory: int | None = None

    def read(self) -> HostReading:
        if time.monotonic() - self._limits_at >= LIMITS_S:
            self._limits_at = time.monotonic()
            # Not the placement's: the limits of whatever the usage is counted for, which may hold several pods.
            self._cpus, self._memory = group_cpus(self._root), memory_limit_of(self._root)
        throttling, cpu = cpu_throttling(self._root), cpu_seconds(self._root)
        return HostReading(
            cpu_seconds=machine_seconds(self._root) if cpu is None else cpu,
            cpus=self._cpus,
            cpu_wait_seconds=self._waits.seconds(),
            throttled_seconds=throttling.seconds,
            throttled_periods=throttling.throttled_periods,
            periods=throttling.periods,
            memory_used_bytes=memory_used_of(self._root),
            memory_limit_bytes=self._memory,
        )


def memory_limit_of(root: Path) -> int | None:
    """Return the memory limit of the control group, else of the machine, in bytes."""
    allowed = memory_limit(root)
    return machine_memory(root).get("MemTotal") if allowed is None else int(allowed)


def memory_used_of(root: Path) -> int | None:
    """Return the memory in use by the control group, else by the machine, in bytes."""
    used = memory_used(root)
    if used:
        return used
    machine = machine_memory(root)
    return machine["MemTotal"] - machine["MemAvailable"] if {"MemTotal", "MemAvailable"} <= machine.keys() else None


def machine_memory(root: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes, by name."""
    lines = (line.split() for line in read_or_empty(root / "proc/meminfo").splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) == 3}


def machine_seconds(root: Path) -> float:
    """Return the CPU time of all processes in seconds; 0 without /proc."""
    ticks = read_or_empty(root / "proc/stat").partition("\n")[0].split()[1:]
    return sum(int(ticks[place]) for place in WORKING) * TICK_S if len(ticks) > max(WORKING) else 0.0


class CpuWaits:
    """Counter of the seconds that a process's descendants were ready without a processor.

    This process is excluded. The kernel forgets ended threads; counted seconds are kept.
    """

    def __init__(self, ancestor: int, root: Path = ROOT) -> None:
        self._ancestor = ancestor
        self._processes = str(root / "proc")
        self._seen: dict[str, int] = {}
        self._nanoseconds = 0
        self._next = 0.0

    def seconds(self) -> float:
        """Return the seconds; costlier counts are made less often."""
        if time.monotonic() >= self._next:
            began, cost = time.monotonic(), time.thread_time()
            self._count()
            self._next = began + (time.thread_time() - cost) / SHARE
        return self._nanoseconds / 1e9

    def _count(self) -> None:
        seen = {}
        for process in descendant_processes(self._ancestor, self._processes):
            threads = f"{self._processes}/{process}/task"
            with contextlib.suppress(OSError):  # the process has ended
                for thread in os.scandir(threads):
                    fields = first_bytes(f"{thread.path}/schedstat").split()
                    if len(fields) > 1:
                        seen[thread.name] = int(fields[1])
        # A smaller value than before means that another thread got the same id.
        for number, waited in seen.items():
            before = self._seen.get(number, 0)
            self._nanoseconds += waited - before if waited >= before else waited
        self._seen = seen


def descendant_processes(ancestor: int, processes: str) -> list[str]:
    """Return the ids of processes below ``ancestor``, without this process and its descendants."""
    children: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):  # a system without /proc
        for process in os.scandir(processes):
            if process.name.isdecimal():
                fields = first_bytes(f"{process.path}/stat").rpartition(b")")[2].split()
                if len(fields) > 1:
                    children.setdefault(fields[1].decode(), []).append(process.name)
    found, below = list[str](), [str(ancestor)]
    while below:
        young = [child for child in children.get(below.pop(), []) if child != str(os.getpid())]
        found += young
        below += young
    return found


def first_bytes(path: str) -> bytes:
    """Return up to 1,024 bytes of a file; empty if it is gone.

    Takes a tenth of the time of ``Path.read_bytes``.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 1024)
    except OSError:
        return b""
    finally:
        os.close(file)


Readings = tuple[DeviceReading, ...]
log = logger("telemetry")


class DriverQuery:
    """Driver that a thread queries through ``read``, which may block or fail."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read
        self._questions: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Readings] = queue.SimpleQueue()
        self._is_asked = False
        self._known: dict[str, DeviceReading] = {}
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self) -> bool:
        """Request readings and return True; return False while an earlier request is pending."""
        if self._is_asked:
            try:
                self._answers.get_nowait()  # an answer after its timeout
            except queue.Empty:
                return False
        self._is_asked = True
        self._questions.put(None)
        return True

    def answer(self, within: float) -> Readings:
        """Return the requested readings, waiting at most ``within`` seconds.

        Known devices without a reading are returned with ``up=False``.
        """
        try:
            readings = self._answers.get(timeout=within) if within > 0 else self._answers.get_nowait()
            self._is_asked = False
        except queue.Empty:
            readings = ()
        present = {reading.uuid: reading for reading in readings}
        self._known |= present
        return tuple(
            present.get(uuid) or DeviceReading(uuid, known.index, known.name, up=False)
            for uuid, known in self._known.items()
        )

    def _work(self) -> None:
        is_told = False
        while True:
            self._questions.get()
            try:
                readings = self._read()
            except Exception as error:
                if not is_told:
                    log.warning("the readings of a driver are missing: %r", error)
                is_told, readings = True, ()
            self._answers.put(readings)


#: Timeout of a driver, in seconds.
DRIVER_S = 0.5


@dataclass(frozen=True)
class SamplerState:
    """Latest sample and node totals, which the metrics server reads."""

    sample: Sample | None = None
    node: NodeTotals = NodeTotals()


class Sampler:
    """Sampler that writes to ``directory``; ``prices`` are the node's dollars per hour, by price name.

    Time counts from ``began_at``, in seconds since 1970.
    """

    def __init__(self, directory: Path, watched: int, prices: dict[str, float], began_at: float) -> None:
        self.state = SamplerState()
        self._directory = directory
        self._host = HostUsage(watched)
        self._drivers = [DriverQuery(NvidiaDevices().read), DriverQuery(AmdDevices().read)]
        self._ring = SampleRing(directory)
        self._counter = NodeCounter(prices)
        self._before = time.monotonic() - max(0.0, time.time() - began_at)
        self._is_told = False

    def sample(self) -> None:
        """Take and store a sample; a failure to store is logged once."""
        until = time.monotonic() + DRIVER_S
        asked = [driver.ask() for driver in self._drivers]
        host = self._host.read()
        devices = [
            reading
            for driver, waits in zip(self._drivers, asked, strict=True)
            for reading in driver.answer(until - time.monotonic() if waits else 0.0)
        ]
        sample, now = Sample(time.time(), host, tuple(devices)), time.monotonic()
        self.state = SamplerState(sample, self._counter.add(sample, now - self._before))
        self._before = now
        try:
            self._ring.add(sample)
            write_node(self._directory, self.state.node)
        except OSError as error:
            if not self._is_told:
                log.warning("samples cannot be kept in %s: %s", self._directory, error.strerror or error)
            self._is_told = True


# In a pod ``/sys`` shows all GPUs of the node. The pod's own GPUs have a readable compute topology (kfd).
AMD = "0x1002"


class AmdDevices:
    """GPUs that ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES select; ``root`` contains /sys."""

    def __init__(self, root: Path = ROOT) -> None:
        self._cards = cards(root)

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the current reading of every GPU.

        Fields whose file is missing or unreadable are None.
        """
        return tuple(map(reading, self._cards))


@dataclass(frozen=True)
class AmdDevice:
    """GPU; ``index`` is its number within the pod."""

    path: Path
    uuid: str
    index: int
    name: str


def cards(root: Path) -> list[AmdDevice]:
    """Return the pod's GPUs, in the order of the compute topology as in ROCm, else in that of the cards."""
    found = [path for path in (root / "sys/class/drm").glob("card*/device") if read_or_empty(path / "vendor") == AMD]
    found.sort(key=lambda path: by_number(path.parent.name))
    nodes = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: by_number(path.name))
    minors = [parse_counters(node / "properties").get("drm_render_minor", 0) for node in nodes]
    if any(minors):
        found = [path for minor in minors if minor for path in found if (path / f"drm/renderD{minor}").exists()]
    chosen = [card(index, path) for index, path in enumerate(found)]
    second = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", second):
        if variable in os.environ:
            names = named_devices(os.environ[variable])
            chosen = [card for number, card in enumerate(chosen) if str(number) in names or card.uuid in names]
    return chosen


def by_number(name: str) -> tuple[int, str]:
    """Return the key by which names of one kind are in the order of their numbers."""
    return len(name), name


def card(index: int, path: Path) -> AmdDevice:
    """Return the GPU with ROCm's UUID, which contains ``index`` if the GPU has no unique id."""
    name = read_or_empty(path / "product_name") or f"AMD GPU {read_or_empty(path / 'device')}".strip()
    return AmdDevice(path, f"GPU-{read_or_empty(path / 'unique_id') or index}", index, name)


def reading(card: AmdDevice) -> DeviceReading:
    path = card.path
    monitor = next(iter(sorted(path.glob("hwmon/hwmon*"))), path / "hwmon")
    used, limit = number(path / "mem_info_vram_used", 1), number(path / "mem_info_vram_total", 1)
    power = number(monitor / "power1_average", 1e-6)
    # MI300 has no temperature of the edge (temp1), only one of the junction (hwmon_attributes_visible in amdgpu_pm.c).
    temperature = number(monitor / "temp1_input", 1e-3)
    return DeviceReading(
        card.uuid,
        card.index,
        card.name,
        up=path.exists(),
        busy=number(path / "gpu_busy_percent", 0.01),
        memory_used_bytes=None if used is None else int(used),
        memory_limit_bytes=None if limit is None else int(limit),
        power_watts=number(monitor / "power1_input", 1e-6) if power is None else power,
        temperature_celsius=number(monitor / "temp2_input", 1e-3) if temperature is None else temperature,
        sm_clock_hertz=number(monitor / "freq1_input", 1),
    )


def number(path: Path, factor: float) -> float | None:
    text = read_or_empty(path)
    return int(text) * factor if text.isdecimal() else None
