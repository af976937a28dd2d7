"""How many GPUs this process may use, and what they are called, found without loading torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def visible_gpus() -> int:
    """How many GPUs this process may use, by NVML for NVIDIA and sysfs for AMD."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in os.environ:
            return len([device for device in os.environ[variable].split(",") if device.strip() not in ("", "-1")])
    return nvidia_gpus() or amd_gpus()


def nvidia_gpus() -> int:
    return len(ask_nvml(lambda handle: handle))


def gpu_names() -> list[str]:
    """The names of this machine's NVIDIA GPUs; empty without any."""
    import pynvml

    return ask_nvml(lambda handle: str(pynvml.nvmlDeviceGetName(handle)))


def bf16_gpus() -> bool:
    """Whether a GPU of this machine computes in bfloat16: NVIDIA's from compute capability 8.0 on, and AMD's."""
    import pynvml

    capable = ask_nvml(lambda handle: tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) >= (8, 0))
    return any(capable) if capable else amd_gpus() > 0


def ask_nvml(question: Callable[[Any], T]) -> list[T]:
    """The answers of NVML about each of this machine's NVIDIA GPUs, given their handles; empty without any."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return list(map(question, handles))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def amd_gpus() -> int:
    """Nodes of the kernel's compute topology that have SIMD units; CPUs are listed there too, with none."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = (line.split() for node in nodes for line in node.read_text().splitlines())
    return sum(1 for line in lines if len(line) == 2 and line[0] == "simd_count" and int(line[1]) > 0)
