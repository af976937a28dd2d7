"""How many GPUs this process may use, what they are called and compute at most, found without loading torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")
#: By a part of the name that the driver gives, the more special before the more general; then by the type that is
#: computed in. Sources: NVIDIA's data sheets of V100, T4, A10, A100, L4, L40S, H100 and H200 (half of the figures that
#: are given "with sparsity"), AMD's of MI300X.
PEAKS: dict[str, dict[str, float]] = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "NVIDIA A10": {"bf16": 125e12, "fp16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "MI300X": {"bf16": 1307e12, "fp16": 1307e12, "tf32": 653e12, "fp32": 163e12},
}
#: Devices that are named like one of the table and compute less: others' halves, and MIG's parts of a GPU.
DIFFERENT = ("A10G", "L40G", "MIG ")


def visible_gpus() -> int:
    """How many GPUs this process may use, by NVML for NVIDIA and sysfs for AMD."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in os.environ:
            return len([device for device in os.environ[variable].split(",") if device.strip() not in ("", "-1")])
    return ask_nvml(lambda nvml: int(nvml.nvmlDeviceGetCount())) or amd_gpus()


def gpu_names() -> list[str]:
    """The names of this machine's NVIDIA GPUs; empty without any."""
    return ask_nvml(lambda nvml: [str(nvml.nvmlDeviceGetName(handle)) for handle in handles(nvml)]) or []


def bf16_gpus() -> bool:
    """Whether a GPU of this machine computes in bfloat16: NVIDIA's from compute capability 8.0 on, and AMD's."""
    capabilities = ask_nvml(
        lambda nvml: [tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles(nvml)]
    )
    return max(capabilities) >= (8, 0) if capabilities else amd_gpus() > 0


def handles(nvml: ModuleType) -> Iterator[object]:
    """What NVML knows each of this machine's NVIDIA GPUs by."""
    return map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))


def ask_nvml(question: Callable[[ModuleType], T]) -> T | None:
    """The answer of NVML, given its module; None where it has none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def amd_gpus() -> int:
    """Nodes of the kernel's compute topology that have SIMD units; CPUs are listed there too, with none."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = (line.split() for node in nodes for line in node.read_text().splitlines())
    return sum(1 for line in lines if len(line) == 2 and line[0] == "simd_count" and int(line[1]) > 0)


def data_sheet_peak(device: str, kind: str) -> float | None:
    """The peak of the device with this name in "fp32", "tf32", "bf16" or "fp16"; None if it is not in the table."""
    if any(part in device for part in DIFFERENT):
        return None
    return next((peaks.get(kind) for name, peaks in PEAKS.items() if name in device), None)
