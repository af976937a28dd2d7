"""How many GPUs this process may use, and what they are called, found without loading torch."""

from __future__ import annotations

import os
from pathlib import Path


def visible_gpus() -> int:
    """How many GPUs this process may use, by NVML for NVIDIA and sysfs for AMD."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in os.environ:
            return len([device for device in os.environ[variable].split(",") if device.strip() not in ("", "-1")])
    return nvidia_gpus() or amd_gpus()


def nvidia_gpus() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0


def gpu_names() -> list[str]:
    """The names of this machine's NVIDIA GPUs; empty without any."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def amd_gpus() -> int:
    """Nodes of the kernel's compute topology that have SIMD units; CPUs are listed there too, with none."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = (line.split() for node in nodes for line in node.read_text().splitlines())
    return sum(1 for line in lines if len(line) == 2 and line[0] == "simd_count" and int(line[1]) > 0)
