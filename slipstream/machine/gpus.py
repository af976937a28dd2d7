"""Number and names of this process's GPUs, found without loading torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import TypeVar, cast

T = TypeVar("T")
ROOT = Path("/")
#: Seconds to wait for a driver, including its loading, on a machine with eight GPUs.
DRIVER_S = 30.0


class DriverHangs(RuntimeError):
    """Error for a driver that does not answer; another machine may succeed."""


def visible_gpus(root: Path = ROOT) -> int:
    """Return the number of GPUs this process may use, by NVML for NVIDIA and sysfs (under ``root``) for AMD.

    Variables that hide GPUs are read as torch reads them (``torch.cuda._parse_visible_devices``). On AMD,
    HIP_VISIBLE_DEVICES (else CUDA_VISIBLE_DEVICES) selects among the GPUs that ROCR_VISIBLE_DEVICES leaves.
    """
    nvidia = ask_nvml(lambda nvml: int(nvml.nvmlDeviceGetCount()))
    chooses = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ and not nvidia else "CUDA_VISIBLE_DEVICES"
    variables = [chooses] if nvidia else ["ROCR_VISIBLE_DEVICES", chooses]
    named = [len(named_devices(os.environ[variable])) for variable in variables if variable in os.environ]
    return min(named) if named else nvidia or amd_gpus(root)


def named_devices(value: str) -> list[str]:
    """Return the devices in a list of numbers or UUIDs, up to the first negative number or empty entry."""
    devices = (device.strip() for device in value.split(","))
    return list(takewhile(lambda device: device and not device.startswith("-"), devices))


def gpu_names() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs; empty without any."""
    return ask_nvml(lambda nvml: [str(nvml.nvmlDeviceGetName(handle)) for handle in handles(nvml)]) or []


def largest_clocks() -> dict[str, float]:
    """Return the maximum SM clock rates (Hz) of this machine's NVIDIA GPUs by UUID; empty if unknown.

    Missing clock rates only degrade an estimate.
    """

    def clocks(nvml: ModuleType) -> dict[str, float]:
        return {
            str(nvml.nvmlDeviceGetUUID(handle)): 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            for handle in handles(nvml)
        }

    try:
        return ask_nvml(clocks) or {}
    except DriverHangs:
        return {}


def bf16_gpus() -> bool:
    """Return True if a GPU of this machine supports bfloat16: NVIDIA from compute capability 8.0 on, and AMD."""
    capabilities = ask_nvml(
        lambda nvml: [tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles(nvml)]
    )
    return max(capabilities) >= (8, 0) if capabilities else amd_gpus() > 0


def handles(nvml: ModuleType) -> Iterator[object]:
    """Yield NVML's handles of this machine's NVIDIA GPUs."""
    return map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))


def ask_nvml(question: Callable[[ModuleType], T]) -> T | None:
    """Return ``question(pynvml)``; None if NVML fails; raises :class:`DriverHangs`."""
    import pynvml

    def ask() -> T | None:
        try:
            pynvml.nvmlInit()
            try:
                return question(pynvml)
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return None

    return in_time(ask)


def in_time(ask: Callable[[], T]) -> T:
    """Return ``ask()``, which queries a driver; raise :class:`DriverHangs` after :data:`DRIVER_S`.

    The call may never return. "No GPU" would be a wrong result: training would silently run on the CPU.
    """
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=work, name="driver", daemon=True).start()
    try:
        answer, error = answers.get(timeout=DRIVER_S)
    except Empty:
        raise DriverHangs(
            f"NVIDIA's driver did not answer within {DRIVER_S:g} s: it hangs, as nvidia-smi would; restart this node, "
            "or keep pods off it"
        ) from None
    if error is not None:
        raise error
    return cast(T, answer)


def amd_gpus(root: Path = ROOT) -> int:
    """Count nodes of the kernel's compute topology with SIMD units; CPUs are also nodes, but have none.

    The topology is that of the machine. The kernel denies reading GPUs that the pod's device cgroup lacks
    (``node_show`` in ``amdkfd/kfd_topology.c``), so readable GPUs are the pod's.
    """
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = (line.split() for node in nodes for line in permitted_text(node).splitlines())
    return sum(1 for line in lines if len(line) == 2 and line[0] == "simd_count" and int(line[1]) > 0)


def permitted_text(path: Path) -> str:
    """Return a file's text, or "" if reading is denied."""
    try:
        return path.read_text(encoding="utf-8")
    except PermissionError:
        return ""
