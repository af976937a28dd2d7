"""The accelerators of a node: driver, torch and NCCL against each other, free memory and who holds the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from slipstream.doctor.findings import Reading

GIB = 1 << 30
#: More than this of a GPU's memory in use before training starts is worth a word.
HELD = 0.05


def nvidia(root: Path, nvml: Any) -> Iterator[Reading]:
    """The driver and the GPUs, through ``nvml`` (the module ``pynvml``)."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield Reading("NVIDIA driver", f"none ({error})")
        return
    try:
        supported = nvml.nvmlSystemGetCudaDriverVersion_v2()
        found = f"{nvml.nvmlSystemGetDriverVersion()}, CUDA up to {supported // 1000}.{supported % 1000 // 10}"
        yield Reading("NVIDIA driver", found, driver_problem(supported // 1000, torch_cuda()))
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            holders = [
                f"{holder(root, process.pid)} ({gib(process.usedGpuMemory or 0)})"
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]
            yield gpu(f"GPU {index}", nvml.nvmlDeviceGetName(handle), memory.total, memory.used, holders)
    finally:
        nvml.nvmlShutdown()


def amd(root: Path) -> Iterator[Reading]:
    """The driver and the GPUs, as sysfs has them."""
    module = root / "sys/module/amdgpu"
    if not module.exists():
        yield Reading("AMD driver", "none (the kernel has no module amdgpu)")
        return
    own = module / "version"
    yield Reading("AMD driver", own.read_text().strip() if own.exists() else "amdgpu, of the kernel")
    processes = sorted((root / "sys/class/kfd/kfd/proc").glob("[0-9]*"))
    holders = [holder(root, int(process.name)) for process in processes if vram_of(process)]
    for total in sorted((root / "sys/class/drm").glob("card*/device/mem_info_vram_total")):
        used = int((total.parent / "mem_info_vram_used").read_text())
        yield gpu(total.parent.parent.name, "AMD", int(total.read_text()), used, holders)


def vram_of(process: Path) -> int:
    return sum(int(file.read_text()) for file in process.glob("vram_*"))


def gpu(what: str, name: str, total: int, used: int, holders: list[str]) -> Reading:
    found = f"{name}, {gib(total - used)} of {gib(total)} free, held by {', '.join(holders) or 'nobody'}"
    busy = used > HELD * total
    return Reading(what, found, "in use already: a training may not find the memory that it needs" if busy else "")


def holder(root: Path, pid: int) -> str:
    """The process as this container sees it; NVML also names those of other containers."""
    name = root / "proc" / str(pid) / "comm"
    return f"{name.read_text().strip()} {pid}" if name.exists() else f"process {pid} of another container"


def driver_problem(supported: int, needed: str) -> str:
    """CUDA is compatible within a major version: an older driver serves it, an older major version's does not."""
    if needed and int(needed.split(".")[0]) > supported:
        return f"torch was built for CUDA {needed}, so that it cannot use these GPUs; update the driver"
    return ""


def torch_cuda() -> str:
    """The CUDA version that torch was built for; empty for builds without."""
    import torch

    return torch.version.cuda or ""


def libraries(gpus_there: bool) -> Iterator[Reading]:
    """torch and NCCL (RCCL on AMD)."""
    import torch
    import torch.distributed as dist

    cuda, hip = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"
    problem = ""
    if gpus_there and not torch.cuda.device_count():
        problem = "torch sees none of this node's GPUs" + ("; install a build for them" if not (cuda or hip) else "")
    yield Reading("torch", f"{torch.__version__}, for {built}, sees {torch.cuda.device_count()} GPUs", problem)
    if not (cuda or hip) or not dist.is_nccl_available():
        yield Reading("NCCL", "none (this torch has no NCCL; process groups use gloo)")
        return
    loaded = ".".join(str(part) for part in torch.cuda.nccl.version())
    yield nccl("RCCL" if hip else "NCCL", loaded, requires("torch") or [])


def nccl(name: str, loaded: str, requirements: list[str]) -> Reading:
    """The version that is loaded beside the wheel that is installed and the one that torch asks for."""
    found = f"{loaded} loaded"
    pinned = [match for line in requirements if (match := re.match(r"(nvidia-nccl-cu\d+)\s*==\s*([\w.]+)", line))]
    for package, wanted in (match.groups() for match in pinned):
        try:
            there = version(package)
        except PackageNotFoundError:
            continue
        found += f", {package} {there} installed"
        if there != wanted:
            return Reading(name, found, f"torch asks for {wanted}: collectives may hang or fail; install that")
        if loaded != wanted:
            return Reading(name, found, "another one is found first: look at LD_LIBRARY_PATH and LD_PRELOAD")
    return Reading(name, found)


def gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"
