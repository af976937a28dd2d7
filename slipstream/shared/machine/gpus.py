"""Number and names of this process's GPUs, found without loading torch."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from slipstream.shared.machine.nvml import (
    DriverHangs,
    ask_nvml,
    list_devices,
    named_devices,
    nvml_handles,
    visible_devices,
)

ROOT = Path("/")


def visible_gpus(root: Path = ROOT) -> int:
    """Return the number of GPUs this process may use, by NVML for NVIDIA and sysfs (under ``root``) for AMD.

    Variables that hide GPUs are read as torch reads them (``torch.cuda._parse_visible_devices``). On AMD,
    HIP_VISIBLE_DEVICES (else CUDA_VISIBLE_DEVICES) selects among the GPUs that ROCR_VISIBLE_DEVICES leaves.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    nvidia = ask_nvml(lambda nvml: (nvml.nvmlDeviceGetCount(), len(visible_devices(list_devices(nvml), chosen))))
    if nvidia and nvidia[0]:
        return nvidia[1]
    chooses = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    variables = ["ROCR_VISIBLE_DEVICES", chooses]
    named = [len(named_devices(os.environ[variable])) for variable in variables if variable in os.environ]
    return min([amd_gpus(root), *named])


def gpu_names() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs; empty without any."""
    return ask_nvml(lambda nvml: [str(nvml.nvmlDeviceGetName(handle)) for handle in nvml_handles(nvml)]) or []


def largest_clocks() -> dict[str, float]:
    """Return the maximum SM clock rates (Hz) of this machine's NVIDIA GPUs by UUID; empty if unknown.

    Missing clock rates only degrade an estimate.
    """

    def clocks(nvml: ModuleType) -> dict[str, float]:
        return {
            str(nvml.nvmlDeviceGetUUID(handle)): 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            for handle in nvml_handles(nvml)
        }

    try:
        return ask_nvml(clocks) or {}
    except DriverHangs:
        return {}


def bf16_gpus() -> bool:
    """Return True if a GPU of this machine supports bfloat16: NVIDIA from compute capability 8.0 on, and AMD."""
    capabilities = ask_nvml(
        lambda nvml: [tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in nvml_handles(nvml)]
    )
    return max(capabilities) >= (8, 0) if capabilities else amd_gpus() > 0


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
