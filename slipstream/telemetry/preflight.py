"""Whether the GPUs that this process sees have the memory that a run needs, before it starts.

NVML says how much is held, and by which processes of the host. In a pod their numbers mean other processes or none: a
holder is named only if ``/proc`` has that process with a GPU open. Partitions (MIG) and GPUs that others share (time
slicing, MPS) are recognised; a shared GPU's free memory is a moment's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.errors import UserError
from slipstream.machine.gpus import ask_nvml, handles

GIB = 2**30
#: Less than this is the driver's own.
NOTICEABLE_BYTES = GIB // 4
#: Set in processes that reach their GPU through NVIDIA's MPS daemon.
MPS_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")


@dataclass(frozen=True)
class GpuMemory:
    """A GPU that is visible, or its first partition, which is all that a process can use of it."""

    #: As a message calls it, such as "GPU 0 (NVIDIA A100)".
    label: str
    total_bytes: int
    free_bytes: int
    #: Held by others, without what the driver reserves.
    held_bytes: int
    #: Those of the holders that can be seen, such as "python (process 123)".
    holders: tuple[str, ...] = ()
    #: How many processes hold it, seen or not; None if the driver does not say.
    processes: int | None = None
    #: Divided by MIG. Without any partition there is no memory.
    partitioned: bool = False


def check_gpu_memory(shared_gpu: str = "", root: Path = Path("/")) -> list[str]:
    """What stands out about the visible GPUs, a sentence each; nothing without NVIDIA's driver.

    ``shared_gpu`` is what the placement says of sharing. ``/proc`` is found under ``root``. Raises ``UserError`` if one
    of them cannot be used at all.
    """
    gpus = visible_memory(os.environ, root)
    for gpu in gpus:
        refuse_if_too_small(gpu)
    return list(remarks(gpus, sharing(os.environ, shared_gpu)))


def refuse_if_too_small(gpu: GpuMemory, needed_bytes: int | None = None) -> None:
    """Raise ``UserError`` if a run that needs so much cannot use this GPU."""
    if gpu.partitioned and not gpu.total_bytes:
        raise UserError(
            f"{gpu.label}: divided by MIG and without a partition; create one (nvidia-smi mig -cgi … -C), or switch "
            "MIG off (nvidia-smi -mig 0)"
        )
    if needed_bytes is None or needed_bytes <= gpu.free_bytes:
        return
    needs = f"{gpu.label}: the run needs {gib(needed_bytes)} of its memory"
    if needed_bytes > gpu.total_bytes:
        raise UserError(
            f"{needs}, which has {gib(gpu.total_bytes)} in all; expected a larger GPU or partition, smaller "
            "micro-batches (training.accumulation), or a layout that divides the model (training.parallel)"
        )
    raise UserError(
        f"{needs} and {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} are free: {held(gpu)}; end those processes, or "
        "choose another GPU (CUDA_VISIBLE_DEVICES)"
    )


def remarks(gpus: list[GpuMemory], shared: str) -> Iterator[str]:
    """What a user should know of GPUs that are not refused."""
    for gpu in gpus:
        if gpu.held_bytes >= NOTICEABLE_BYTES:
            yield f"{gpu.label}: {held(gpu)}"
        if gpu.partitioned:
            yield f"{gpu.label}: divided by MIG; a process has {gib(gpu.total_bytes)}, its first partition"
        if shared:
            yield f"{gpu.label}: shared with other pods ({shared}): its {gib(gpu.free_bytes)} are free at this moment"


def held(gpu: GpuMemory) -> str:
    """Who holds how much."""
    unseen = (gpu.processes or 0) - len(gpu.holders)
    others = [f"{unseen} process{'es' if unseen > 1 else ''} that cannot be seen from here"] if unseen > 0 else []
    who = ", ".join((*gpu.holders, *others)) or "processes that cannot be seen from here"
    return f"{gib(gpu.held_bytes)} are held by {who}"


def sharing(environment: Mapping[str, str], shared_gpu: str) -> str:
    """How the GPUs are shared with other processes, "" if nothing says so."""
    return shared_gpu or ("mps" if any(environment.get(name) for name in MPS_VARIABLES) else "")


def visible_memory(environment: Mapping[str, str], root: Path = Path("/")) -> list[GpuMemory]:
    """The memory of the NVIDIA GPUs and partitions that CUDA_VISIBLE_DEVICES leaves, all of them if it is not set."""
    return ask_nvml(lambda nvml: [memory_of(nvml, handle, root) for handle in visible(nvml, environment)]) or []


def memory_of_gpu(uuid: str) -> GpuMemory | None:
    """Of the NVIDIA GPU or partition that CUDA gives this UUID; None where the driver does not know it."""
    known = (visible_memory({"CUDA_VISIBLE_DEVICES": f"{kind}-{uuid}"}) for kind in ("GPU", "MIG"))
    return next((gpus[0] for gpus in known if gpus), None)


def visible(nvml: ModuleType, environment: Mapping[str, str]) -> Iterator[object]:
    """The handles of what CUDA_VISIBLE_DEVICES names, by number or UUID, up to the first that is none."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        yield from handles(nvml)
        return
    names = (name.strip() for name in named.split(","))
    for name in takewhile(lambda name: name and not name.startswith("-"), names):
        try:
            by_number = name.isdecimal()
            yield nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            return


def memory_of(nvml: ModuleType, handle: object, root: Path) -> GpuMemory:
    """The memory of a GPU, of its first partition if it is divided, or of the partition that the handle is."""
    name = nvml.nvmlDeviceGetName(handle)
    parent = handle
    if is_partition(nvml, handle):
        label, partitioned = f"partition {nvml.nvmlDeviceGetUUID(handle)} ({name})", True
        parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    else:
        label, partitioned = f"GPU {nvml.nvmlDeviceGetIndex(handle)} ({name})", is_divided(nvml, handle)
    if partitioned and parent is handle:
        first = first_partition(nvml, handle)
        if first is None:
            return GpuMemory(label, 0, 0, 0, partitioned=True)
        handle = first
    memory = memory_info(nvml, handle)
    processes = compute_processes(nvml, handle)
    seen = [holder for holder in (holder_name(pid, root) for pid in processes or ()) if holder]
    number = None if processes is None else len(processes)
    return GpuMemory(label, memory.total, memory.free, memory.used, tuple(seen), number, partitioned)


def memory_info(nvml: ModuleType, handle: object) -> Any:
    """Bytes in all, free and used; what the driver reserves is not among the used, where it says so."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def is_partition(nvml: ModuleType, handle: object) -> bool:
    try:
        return bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
    except nvml.NVMLError:
        return False


def is_divided(nvml: ModuleType, handle: object) -> bool:
    try:
        return nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        return False


def first_partition(nvml: ModuleType, handle: object) -> object | None:
    """The one that CUDA gives a process."""
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:
            continue
    return None


def compute_processes(nvml: ModuleType, handle: object) -> list[int] | None:
    """The host's numbers of the processes that compute on it, None if the driver does not say."""
    try:
        return [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)]
    except nvml.NVMLError:
        return None


def holder_name(pid: int, root: Path) -> str:
    """The process by its command and number, "" unless it can be seen to have a GPU open."""
    directory = root / "proc" / str(pid)
    try:
        opened = (str(link.readlink()) for link in (directory / "fd").iterdir())
        if not any(target.startswith("/dev/nvidia") for target in opened):
            return ""
        return f"{(directory / 'comm').read_text(encoding='utf-8', errors='replace').strip()} (process {pid})"
    except OSError:
        return ""


def gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"
