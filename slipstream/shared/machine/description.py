"""CPU of this machine, whose instruction set decides whether INT8 is faster than FP32."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from slipstream.shared.machine.gpus import gpu_names
from slipstream.shared.machine.limits import usable_cores

CPUINFO = Path("/proc/cpuinfo")
#: Instruction set extensions that affect the speed of INT8 matmuls and, on x86, the exactness of their sums.
EXTENSIONS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)
VNNI = ("avx_vnni", "avx512_vnni", "amx_int8")


@dataclass(frozen=True)
class ClusterMachine:
    """CPU name, architecture ("x86_64", "aarch64", ...) and available :data:`EXTENSIONS`."""

    cpu: str
    architecture: str
    flags: tuple[str, ...]

    @property
    def saturates(self) -> bool:
        """True if U8 x S8 matmuls overflow 16-bit sums (x86 without VNNI, onnxruntime#6004)."""
        return self.architecture in ("x86_64", "AMD64", "i686") and not set(VNNI) & set(self.flags)


def this_machine(cpuinfo: Path = CPUINFO) -> ClusterMachine:
    """Return this machine from Linux's ``cpuinfo``; on other systems from ``platform``, without flags."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    present = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()
    flags = tuple(flag for flag in EXTENSIONS if flag in present)
    architecture = platform.machine()
    return ClusterMachine(fields.get("model name") or platform.processor() or architecture, architecture, flags)


def measuring_machine() -> str:
    """Return, as text, what timings depend on: CPU, its extensions, this process's cores, and GPUs."""
    machine = this_machine()
    cpu = f"{machine.cpu}, {machine.architecture}, {' '.join(machine.flags)}, {usable_cores()} cores"
    return ", ".join([cpu, *gpu_names()])
