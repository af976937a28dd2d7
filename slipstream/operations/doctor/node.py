"""Readings of a node (or the pod on it) for training; unreadable ones say why, and nothing raises.

``root`` holds /proc, /sys and /dev, so tests can read copies of other machines.
"""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slipstream.operations.doctor.findings import NodeReading
from slipstream.shared.formatting import count_with_noun, size_text
from slipstream.shared.machine.limits import cpu_quota, memory_limit, visible_cores
from slipstream.shared.machine.nvml import in_time, memory_info, nvml_handles
from slipstream.shared.one_line import without_secrets
from slipstream.shared.storage import STORES, ConditionIgnored, check_conditional_writes, storage_for, store_time

ROOT = Path("/")
STORE_MIB = 16
#: Tolerated clock skew in seconds. S3 refuses requests from 15 minutes on; certificates and tokens fail earlier.
SKEW_S = 60.0
#: Default size of a container's /dev/shm.
SMALL_SHM = 64 << 20
#: Fraction of a GPU's memory in use before training above which it is reported.
HELD = 0.05
#: Oldest Linux driver for every major version of CUDA (NVIDIA, "CUDA Compatibility", minor versions).
DRIVERS = {11: 450, 12: 525, 13: 580}


def read_node(store: str = "", endpoint: str = "", root: Path = ROOT) -> list[NodeReading]:
    """Read all properties of this node.

    ``store`` is a directory or URI that is written to and read from; the clock is compared with the HTTP(S) address
    ``endpoint``.
    """
    import pynvml

    gpus = [
        *safe_readings("NVIDIA driver", lambda: in_time(lambda: list(nvidia_readings(root, pynvml, torch_cuda())))),
        *safe_readings("AMD driver", lambda: amd_readings(root)),
    ]
    there = any(" free" in reading.found for reading in gpus)
    return [
        NodeReading("host", socket.gethostname()),
        *gpus,
        *safe_readings("torch", lambda: library_readings(there)),
        *safe_readings("/dev/shm", lambda: shared_memory(root)),
        *safe_readings("CPU", lambda: processor_readings(root, visible_cores())),
        *safe_readings("memory", lambda: memory_readings(root)),
        *safe_readings("NUMA", lambda: numa_readings(root)),
        *safe_readings("network", lambda: interface_readings(root)),
        *safe_readings("InfiniBand, EFA", lambda: fabric_readings(root)),
        *safe_readings("store", lambda: store_speed(store)),
        *safe_readings("conditional writes", lambda: conditional_writes(store)),
        *safe_readings("clock", lambda: clock_readings(store, endpoint)),
    ]


def safe_readings(what: str, look: Callable[[], Iterable[NodeReading]]) -> Iterator[NodeReading]:
    """Yield the readings of ``look``, and its error if it fails."""
    try:
        yield from look()
    except Exception as error:  # a missing device must not hide the other readings
        yield NodeReading(what, f"not read: {type(error).__name__}: {' '.join(str(error).split())}")


def shared_memory(root: Path) -> Iterator[NodeReading]:
    state = os.statvfs(root / "dev/shm")
    total, free = state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail
    small = total <= SMALL_SHM
    problem = "a container's default: too small for NCCL and loaders; set shared_memory in the profile" if small else ""
    yield NodeReading("/dev/shm", f"{size_text(free)} of {size_text(total)} free", problem)


def processor_readings(root: Path, visible: int) -> Iterator[NodeReading]:
    """Yield the visible cores, the cgroup's CPU limit and OMP_NUM_THREADS."""
    quota, told = cpu_quota(root), os.environ.get("OMP_NUM_THREADS")
    text = f"{visible} cores in the affinity mask, cgroup limit {f'{quota:g}' if quota else 'none'}"
    problem = ""
    if quota and quota < visible and not told:
        problem = f"libraries that count cores start {visible} threads on {quota:g} CPUs; set OMP_NUM_THREADS"
    yield NodeReading("CPU", f"{text}, OMP_NUM_THREADS {told or 'not set'}", problem)


def memory_readings(root: Path) -> Iterator[NodeReading]:
    """Yield the machine's memory and the cgroup's limit."""
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    limit = memory_limit(root)
    available = f"{size_text(kib['MemAvailable'] << 10)} of {size_text(kib['MemTotal'] << 10)} available"
    yield NodeReading("memory", f"{available}, cgroup limit {size_text(int(limit)) if limit else 'none'}")


def numa_readings(root: Path) -> Iterator[NodeReading]:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    if not nodes:
        yield NodeReading("NUMA", "not read: the kernel shows no NUMA nodes")
        return
    cpus = [f"{node.name} has CPUs {(node / 'cpulist').read_text(encoding='utf-8').strip()}" for node in nodes]
    yield NodeReading("NUMA", f"{count_with_noun(len(nodes), 'node')}: {'; '.join(cpus)}")


def interface_readings(root: Path) -> Iterator[NodeReading]:
    for interface in sorted((root / "sys/class/net").iterdir()):
        state = (interface / "operstate").read_text(encoding="utf-8").strip()
        text = f"{state}, MTU {(interface / 'mtu').read_text(encoding='utf-8').strip()}"
        try:
            speed = int((interface / "speed").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the loopback and many virtual interfaces refuse
            speed = 0
        yield NodeReading(
            f"network {interface.name}", f"{text}, {speed} Mbit/s" if speed > 0 else f"{text}, speed unknown"
        )


def fabric_readings(root: Path) -> Iterator[NodeReading]:
    """Yield the InfiniBand, RoCE and EFA devices."""
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    if not devices:
        yield NodeReading("InfiniBand, EFA", "none (the kernel shows no RDMA device)")
    for device in devices:
        driver = (device / "device/driver").resolve().name
        for port in sorted((device / "ports").iterdir()):
            state, rate = ((port / name).read_text(encoding="utf-8").strip() for name in ("state", "rate"))
            problem = "" if "ACTIVE" in state else "this port carries no traffic"
            kind = "EFA" if driver == "efa" else "RDMA"
            yield NodeReading(f"{kind} {device.name}", f"port {port.name}: {state}, {rate}", problem)


def store_speed(uri: str) -> Iterator[NodeReading]:
    """Measure writing a new object to the store and reading it back; it is deleted."""
    if not uri:
        yield NodeReading("store", "not read: no --store was given")
        return
    data, key = os.urandom(STORE_MIB << 20), f"doctor-{uuid.uuid4().hex}"
    storage = storage_for(uri)
    started = time.perf_counter()
    storage.put(key, data)
    written = time.perf_counter()
    try:
        with TemporaryDirectory(prefix="doctor-") as directory:
            same = storage.get(key, Path(directory)).read_bytes() == data
            read = time.perf_counter()
    finally:
        storage.delete([key])
    speeds = (STORE_MIB / (written - started), STORE_MIB / (read - written))
    found = "{}: {} MiB written at {:.0f} MiB/s, read at {:.0f} MiB/s".format(uri, STORE_MIB, *speeds)
    yield NodeReading("store", found, "" if same else "the bytes that were read are not those that were written")


def conditional_writes(uri: str) -> Iterator[NodeReading]:
    """Create one object twice; the second write must be refused."""
    if not uri:
        yield NodeReading("conditional writes", "not read: no --store was given")
        return
    try:
        check_conditional_writes(storage_for(uri))
    except ConditionIgnored:
        problem = "two runs could take the same attempt, trial or promotion; use a store that honours the condition"
        yield NodeReading("conditional writes", f"{uri}: the second write of a key replaced the first", problem)
    else:
        yield NodeReading("conditional writes", f"{uri}: the second write of a key was refused, as it must be")


def clock_readings(store: str, endpoint: str) -> Iterator[NodeReading]:
    """Compare this machine's clock with an HTTP(S) endpoint's Date header, or with the store.

    The user and password of the endpoint are neither sent nor shown.
    """
    if not endpoint and not store.startswith(STORES):
        why = "a directory has this machine's clock" if store else "there is no store to compare with"
        yield NodeReading("clock", f"not read: {why}; give --endpoint URL")
        return
    endpoint = without_secrets(endpoint)
    before = time.time()
    if endpoint:
        header = date_of(endpoint)
        there = parsedate_to_datetime(header).timestamp() if header else None
    else:
        there = store_time(store)
    middle = (before + time.time()) / 2
    if there is None:
        yield NodeReading("clock", f"not read: {endpoint} sent no Date")
        return
    # The header is truncated to whole seconds.
    skew = middle - (there + 0.5)
    problem = f"signatures and certificates may be refused; it is {datetime.now(UTC):%H:%M:%S} UTC here, start NTP"
    yield NodeReading("clock", f"{skew:+.0f} s against {endpoint or store}", problem if abs(skew) > SKEW_S else "")


def date_of(endpoint: str) -> str:
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.headers.get("Date", "")
    except urllib.error.HTTPError as refusal:  # error responses have a date, too
        return refusal.headers.get("Date", "")


def nvidia_readings(root: Path, nvml: Any, needed: str) -> Iterator[NodeReading]:
    """Yield the driver and the GPUs.

    ``nvml`` is the module ``pynvml``; ``needed`` is the CUDA version that torch was built for ("": none).
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield NodeReading("NVIDIA driver", f"none ({error})")
        return
    try:
        supported = nvml.nvmlSystemGetCudaDriverVersion_v2()
        found = f"{nvml.nvmlSystemGetDriverVersion()}, CUDA up to {supported // 1000}.{supported % 1000 // 10}"
        yield NodeReading("NVIDIA driver", found, driver_problem(supported // 1000, needed))
        for index, handle in enumerate(nvml_handles(nvml)):
            name, memory = nvml.nvmlDeviceGetName(handle), memory_info(nvml, handle)
            if memory is None:
                yield NodeReading(f"GPU {index}", f"{name}, the driver does not report its memory")
                continue
            holders = [
                f"{process_holding_gpu(root, process.pid)} ({size_text(process.usedGpuMemory or 0)})"
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]
            yield gpu_reading(f"GPU {index}", name, memory.total, memory.used, holders)
    finally:
        nvml.nvmlShutdown()


def amd_readings(root: Path) -> Iterator[NodeReading]:
    """Yield the driver and the GPUs from sysfs."""
    module = root / "sys/module/amdgpu"
    if not module.exists():
        yield NodeReading("AMD driver", "none (the kernel has no module amdgpu)")
        return
    own = module / "version"
    yield NodeReading(
        "AMD driver", own.read_text(encoding="utf-8").strip() if own.exists() else "amdgpu, of the kernel"
    )
    processes = sorted((root / "sys/class/kfd/kfd/proc").glob("[0-9]*"))
    holding = [
        process
        for process in processes
        if any(int(file.read_text(encoding="utf-8")) for file in process.glob("vram_*"))
    ]
    holders = [process_holding_gpu(root, int(process.name)) for process in holding]
    for total in sorted((root / "sys/class/drm").glob("card*/device/mem_info_vram_total")):
        used = int((total.parent / "mem_info_vram_used").read_text(encoding="utf-8"))
        yield gpu_reading(total.parent.parent.name, "AMD", int(total.read_text(encoding="utf-8")), used, holders)


def gpu_reading(what: str, name: str, total: int, used: int, holders: list[str]) -> NodeReading:
    found = (
        f"{name}, {size_text(total - used)} of {size_text(total)} free, held by {', '.join(holders) or 'no process'}"
    )
    busy = used > HELD * total
    return NodeReading(what, found, "in use already: a training may not find the memory that it needs" if busy else "")


def process_holding_gpu(root: Path, pid: int) -> str:
    """Return a process's name and id; it may be in another container."""
    name = root / "proc" / str(pid) / "comm"
    if not name.exists():
        return f"process {pid} of another container"
    return f"{name.read_text(encoding='utf-8', errors='replace').strip()} {pid}"


def driver_problem(supported: int, needed: str) -> str:
    """Return why a driver is too old for torch; "" if it is not.

    CUDA is compatible within a major version: an older driver suffices if it supports the same major version.
    """
    major = int(needed.split(".")[0]) if needed else 0
    if major <= supported:
        return ""
    least = f" to {DRIVERS[major]} or newer" if major in DRIVERS else ""
    return f"torch was built for CUDA {needed}, so that it cannot use these GPUs; update the driver{least}"


def torch_cuda() -> str:
    """Return the CUDA version that torch was built for; "" for other builds."""
    import torch

    return torch.version.cuda or ""


def library_readings(gpus_there: bool) -> Iterator[NodeReading]:
    """Yield the versions of torch and NCCL (RCCL on AMD)."""
    import torch
    import torch.distributed as dist

    cuda, hip = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"
    problem = ""
    if gpus_there and not torch.cuda.device_count():
        problem = "torch sees none of this node's GPUs" + ("; install a build for them" if not (cuda or hip) else "")
    yield NodeReading("torch", f"{torch.__version__}, for {built}, sees {torch.cuda.device_count()} GPUs", problem)
    if not (cuda or hip) or not dist.is_nccl_available():
        yield NodeReading("NCCL", "none (this torch has no NCCL; process groups use gloo)")
        return
    loaded = ".".join(str(part) for part in torch.cuda.nccl.version())
    yield nccl_reading("RCCL" if hip else "NCCL", loaded, requires("torch") or [])


def nccl_reading(name: str, loaded: str, requirements: list[str]) -> NodeReading:
    """Compare the loaded version with the installed package and torch's requirement."""
    found = f"{loaded} loaded"
    pinned = [match for line in requirements if (match := re.match(r"(nvidia-nccl-cu\d+)\s*==\s*([\w.]+)", line))]
    for package, wanted in (match.groups() for match in pinned):
        try:
            there = version(package)
        except PackageNotFoundError:
            continue
        found += f", {package} {there} installed"
        if there != wanted:
            return NodeReading(name, found, f"torch asks for {wanted}: collectives may hang or fail; install that")
        if loaded != wanted:
            return NodeReading(name, found, "another one is found first: check LD_LIBRARY_PATH and LD_PRELOAD")
    return NodeReading(name, found)
