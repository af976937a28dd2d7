"""GPU memory check before a run starts.

NVML reports used memory and process ids of the host. In a pod these ids mean other processes or none, so a process is
named only if ``/proc`` shows it with a GPU open. Partitions (MIG) and shared GPUs (time slicing, MPS) are recognised;
the free memory of a shared GPU is a snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from slipstream.shared.errors import UserError
from slipstream.shared.formatting import count_with_noun, size_text
from slipstream.shared.machine.nvml import DeviceLost, NvmlDevice, ask_nvml, list_devices, memory_info, visible_devices

#: Memory that other processes must hold to be reported; the driver itself holds less.
NOTICEABLE_BYTES = 1 << 28
#: Environment variables that indicate the use of NVIDIA's MPS daemon.
MPS_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a visible GPU, or of its first MIG partition, since CUDA uses only one."""

    #: Name in messages, such as "GPU 0 (NVIDIA A100)".
    label: str
    total_bytes: int
    free_bytes: int
    #: Bytes held by processes, without the driver's reserve.
    held_bytes: int
    #: Visible processes that hold memory, such as "python (process 123)".
    holders: tuple[str, ...] = ()
    #: Number of processes that hold memory, visible or not; None if the driver does not report it.
    processes: int | None = None
    #: True if divided by MIG; without any partition all sizes are 0.
    partitioned: bool = False


def check_gpu_memory(shared_gpu: str = "", root: Path = Path("/")) -> list[str]:
    """Return remarks about the visible GPUs, such as memory held by other processes.

    ``shared_gpu`` is the placement's mode of sharing; ``root`` contains ``/proc``. Empty without NVIDIA's driver.
    Raises ``UserError`` if a GPU cannot be used at all.
    """
    gpus = visible_memory(os.environ, root)
    for gpu in gpus:
        refuse_if_too_small(gpu)
    return list(gpu_remarks(gpus, sharing_mode(os.environ, shared_gpu)))


def refuse_if_too_small(gpu: GpuMemory, needed_bytes: int | None = None) -> None:
    """Raise ``UserError`` if a run that needs ``needed_bytes`` (None: unknown) cannot use this GPU."""
    if gpu.partitioned and not gpu.total_bytes:
        raise UserError(
            f"{gpu.label}: divided by MIG and without a partition; create one (nvidia-smi mig -cgi … -C), or switch "
            "MIG off (nvidia-smi -mig 0)"
        )
    if needed_bytes is None or needed_bytes <= gpu.free_bytes:
        return
    needs = f"{gpu.label}: the run needs {size_text(needed_bytes)} of its memory"
    if needed_bytes > gpu.total_bytes:
        raise UserError(
            f"{needs}, which has {size_text(gpu.total_bytes)} in all; expected a larger GPU or partition, smaller "
            "micro-batches (training.accumulation), or a layout that divides the model (training.parallel)"
        )
    raise UserError(
        f"{needs} and {size_text(gpu.free_bytes)} of {size_text(gpu.total_bytes)} are free: {held_memory(gpu)}; end "
        "those processes, or choose another GPU (CUDA_VISIBLE_DEVICES)"
    )


def gpu_remarks(gpus: list[GpuMemory], shared: str) -> Iterator[str]:
    """Yield remarks about usable GPUs: held memory, partitions, sharing."""
    for gpu in gpus:
        if gpu.held_bytes >= NOTICEABLE_BYTES:
            yield f"{gpu.label}: {held_memory(gpu)}"
        if gpu.partitioned:
            yield f"{gpu.label}: divided by MIG; a process uses one partition, which has {size_text(gpu.total_bytes)}"
        if shared:
            free = size_text(gpu.free_bytes)
            yield f"{gpu.label}: shared with other pods ({shared}): its {free} are free at this moment"


def held_memory(gpu: GpuMemory) -> str:
    """Return the held memory and its holders in words."""
    unseen = (gpu.processes or 0) - len(gpu.holders)
    others = [f"{count_with_noun(unseen, 'process')} that cannot be seen from here"] if unseen > 0 else []
    who = ", ".join((*gpu.holders, *others)) or "processes that cannot be seen from here"
    return f"{size_text(gpu.held_bytes)} are held by {who}"


def sharing_mode(environment: Mapping[str, str], shared_gpu: str) -> str:
    """Return how the GPUs are shared, such as "mps"; "" if they are not, as far as known."""
    return shared_gpu or ("mps" if any(environment.get(name) for name in MPS_VARIABLES) else "")


def visible_memory(environment: Mapping[str, str], root: Path = Path("/")) -> list[GpuMemory]:
    """Return the memory of the NVIDIA GPUs and partitions in CUDA_VISIBLE_DEVICES (default: all)."""

    def ask(nvml: ModuleType) -> list[GpuMemory]:
        chosen = visible_devices(list_devices(nvml), environment.get("CUDA_VISIBLE_DEVICES"))
        known = (memory_of(nvml, devices[0], root) for devices in chosen)  # CUDA uses one partition of a GPU
        return [memory for memory in known if memory]

    return ask_nvml(ask) or []


def memory_of_gpu(uuid: str) -> GpuMemory | None:
    """Return the memory of the GPU or partition with CUDA's ``uuid``, if known."""
    known = (visible_memory({"CUDA_VISIBLE_DEVICES": f"{kind}-{uuid}"}) for kind in ("GPU", "MIG"))
    return next((gpus[0] for gpus in known if gpus), None)


def memory_of(nvml: ModuleType, device: NvmlDevice, root: Path) -> GpuMemory | None:
    """Return the memory of a GPU or partition; None if unknown."""
    label = f"GPU {device.index}{f', partition {device.uuid}' if device.is_partition else ''} ({device.name})"
    if device.divided and not device.is_partition:
        return GpuMemory(label, 0, 0, 0, partitioned=True)
    try:
        memory = device.handle and memory_info(nvml, device.handle)
    except DeviceLost:
        return None
    if not memory:
        return None
    processes = compute_processes(nvml, device.handle)
    seen = [holder for holder in (holder_name(pid, root) for pid in processes or ()) if holder]
    number = None if processes is None else len(processes)
    return GpuMemory(label, memory.total, memory.free, memory.used, tuple(seen), number, device.divided)


def compute_processes(nvml: ModuleType, handle: object) -> list[int] | None:
    """Return the host's process ids on the GPU; None if the driver does not report them."""
    try:
        return [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)]
    except nvml.NVMLError:
        return None


def holder_name(pid: int, root: Path) -> str:
    """Return a process's command and id; "" if ``/proc`` does not show it with a GPU open."""
    directory = root / "proc" / str(pid)
    try:
        opened = (str(link.readlink()) for link in (directory / "fd").iterdir())
        if not any(target.startswith("/dev/nvidia") for target in opened):
            return ""
        return f"{(directory / 'comm').read_text(encoding='utf-8', errors='replace').strip()} (process {pid})"
    except OSError:
        return ""
