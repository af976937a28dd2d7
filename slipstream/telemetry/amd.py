"""AMD GPUs as the kernel's files show them: utilisation, memory, power, temperature and clock.

In a pod ``/sys`` shows all GPUs of the node. The pod's are those of which the compute topology (kfd) may be read.
"""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.machine.gpus import named_devices
from slipstream.machine.limits import numbers, read
from slipstream.telemetry.records import DeviceReading

AMD = "0x1002"
ROOT = Path("/")


class AmdDevices:
    """The GPUs that ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES leave to this process; ``root`` holds /sys."""

    def __init__(self, root: Path = ROOT) -> None:
        self._cards = cards(root)

    def read(self) -> tuple[DeviceReading, ...]:
        """Each of them now. A file that is missing, or may not be read, leaves its field None."""
        return tuple(reading(index, card) for index, card in self._cards)


def cards(root: Path) -> list[tuple[int, Path]]:
    """The visible GPUs' directories, each with its number among those of the pod."""
    found = [path for path in (root / "sys/class/drm").glob("card*/device") if read(path / "vendor") == AMD]
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    minors = {numbers(node).get("drm_render_minor", 0) for node in nodes} - {0}
    if minors:
        found = [path for path in found if any((path / f"drm/renderD{minor}").exists() for minor in minors)]
    chosen = list(enumerate(sorted(found, key=lambda path: (len(path.parent.name), path.parent.name))))
    second = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", second):
        if variable in os.environ:
            names = named_devices(os.environ[variable])
            chosen = [card for number, card in enumerate(chosen) if str(number) in names or uuid_of(*card) in names]
    return chosen


def uuid_of(index: int, card: Path) -> str:
    """As ROCm names it; a card without an identity of its own is named by its place."""
    return f"GPU-{read(card / 'unique_id') or index}"


def reading(index: int, card: Path) -> DeviceReading:
    monitor = next(iter(sorted(card.glob("hwmon/hwmon*"))), card / "hwmon")
    used, limit = number(card / "mem_info_vram_used", 1), number(card / "mem_info_vram_total", 1)
    power = number(monitor / "power1_average", 1e-6)
    return DeviceReading(
        uuid_of(index, card),
        index,
        read(card / "product_name") or f"AMD GPU {read(card / 'device')}".strip(),
        up=card.exists(),
        busy=number(card / "gpu_busy_percent", 0.01),
        memory_used_bytes=None if used is None else int(used),
        memory_limit_bytes=None if limit is None else int(limit),
        power_watts=number(monitor / "power1_input", 1e-6) if power is None else power,
        temperature_celsius=number(monitor / "temp1_input", 1e-3),
        sm_clock_hertz=number(monitor / "freq1_input", 1),
    )


def number(path: Path, factor: float) -> float | None:
    text = read(path)
    return int(text) * factor if text.isdecimal() else None
