"""Number and names of this process's GPUs, found without loading torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from slipstream.shared.errors import UserError
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


#: GKE's mount of the driver's libraries; the dynamic linker finds them only by the image's LD_LIBRARY_PATH.
GKE_DRIVER = Path("/usr/local/nvidia/lib64")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check_asked_gpus(asked: int, seen: int, torch_builds: str | None, environment: Mapping[str, str]) -> None:
    """Raise ``UserError`` if a pod that ``asked`` for GPUs has none that torch can use.

    ``torch_builds`` is torch's version of CUDA or ROCm; None for a CPU build.
    """
    if not asked:
        return
    if torch_builds is None:
        raise UserError(
            f"profile.gpu: the pod asked for {gpus(asked)}, but torch in its image was built for CPUs; build the image "
            "with images/cuda.Dockerfile or images/rocm.Dockerfile"
        )
    if not seen:
        raise UserError(f"profile.gpu: the pod asked for {gpus(asked)} and sees none; {likely_cause(environment)}")


def gpus(number: int) -> str:
    return f"{number} GPU{'s' if number > 1 else ''}"


def likely_cause(environment: Mapping[str, str]) -> str:
    """Return the most likely reason for missing GPUs, and its fix."""
    if hidden := next((name for name in HIDING if environment.get(name, "0").strip() in ("", "-1")), None):
        return f"{hidden}={environment[hidden]} hides them: remove it from profile.environment and the image"
    if GKE_DRIVER.is_dir() and str(GKE_DRIVER) not in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        return f"the driver is mounted at {GKE_DRIVER}: set LD_LIBRARY_PATH={GKE_DRIVER} in the image (GKE)"
    return (
        f"the driver's libraries are not found: on GKE set LD_LIBRARY_PATH={GKE_DRIVER} in the image, elsewhere the "
        "node needs its container toolkit as runtime (NVIDIA) or /dev/kfd in the pod (AMD)"
    )


#: FLOP/s by words of the driver's device name, specific names first; then by precision. Sources: NVIDIA's data sheets
#: of V100, T4, A10, A100, L4, L40, L40S, H100, H200 and HGX B200 (half of the figures that are given "with sparsity"),
#: AMD's of MI300X and MI325X.
PEAKS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 75e12},
    "H200 NVL": {"bf16": 836e12, "fp16": 836e12, "tf32": 418e12, "fp32": 60e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 NVL": {"bf16": 836e12, "fp16": 836e12, "tf32": 418e12, "fp32": 60e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "L40": {"bf16": 181e12, "fp16": 181e12, "tf32": 90.5e12, "fp32": 90.5e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "A10": {"bf16": 125e12, "fp16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "V100-PCIE": {"fp16": 112e12, "fp32": 14e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "MI300X": {"bf16": 1307e12, "fp16": 1307e12, "tf32": 653e12, "fp32": 163e12},
    "MI325X": {"bf16": 1307e12, "fp16": 1307e12, "tf32": 653e12, "fp32": 163e12},
}
#: Word in the device name of a MIG partition, which is slower than the GPU that it is named after.
PART = "MIG "


def data_sheet_peak(device: str, kind: str) -> float | None:
    """Return the peak FLOP/s of a device in "fp32", "tf32", "bf16" or "fp16"; None if not in the table.

    Only whole words of the name count: longer names with the same prefix (A10G, T400, RTX A1000) are other GPUs.
    """
    if PART in device:
        return None
    return next((peaks.get(kind) for name, peaks in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
