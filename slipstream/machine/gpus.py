"""How many GPUs this process may use, and what they are called, found without loading torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
    import pynvml

    return ask_nvml(lambda: int(pynvml.nvmlDeviceGetCount())) or 0


def gpu_names() -> list[str]:
    """The names of this machine's NVIDIA GPUs; empty without any."""
    import pynvml

    return ask_nvml(lambda: [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles()]) or []


def bf16_gpus() -> bool:
    """Whether a GPU of this machine computes in bfloat16: NVIDIA's from compute capability 8.0 on, and AMD's."""
    import pynvml

    found = ask_nvml(lambda: [tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles()])
    return max(found) >= (8, 0) if found else amd_gpus() > 0


def handles() -> Iterator[Any]:
    """What NVML knows each of this machine's NVIDIA GPUs by."""
    import pynvml

    return map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))


def ask_nvml(question: Callable[[], T]) -> T | None:
    """The answer of NVML; None where it has none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return question()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def amd_gpus() -> int:
    """Nodes of the kernel's compute topology that have SIMD units; CPUs are listed there too, with none."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = (line.split() for node in nodes for line in node.read_text().splitlines())
    return sum(1 for line in lines if len(line) == 2 and line[0] == "simd_count" and int(line[1]) > 0)
