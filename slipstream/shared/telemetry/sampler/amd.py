"""AMD GPU readings from the kernel's files: utilisation, memory, power, temperature and clock.

In a pod ``/sys`` shows all GPUs of the node. The pod's own GPUs have a readable compute topology (kfd).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slipstream.shared.machine.limits import parse_counters, read_or_empty
from slipstream.shared.machine.nvml import named_devices
from slipstream.shared.telemetry.records import DeviceReading

AMD = "0x1002"
ROOT = Path("/")


class AmdDevices:
    """GPUs that ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES select; ``root`` contains /sys."""

    def __init__(self, root: Path = ROOT) -> None:
        self._cards = cards(root)

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the current reading of every GPU.

        Fields whose file is missing or unreadable are None.
        """
        return tuple(map(reading, self._cards))


@dataclass(frozen=True)
class AmdDevice:
    """GPU; ``index`` is its number within the pod."""

    path: Path
    uuid: str
    index: int
    name: str


def cards(root: Path) -> list[AmdDevice]:
    found = [path for path in (root / "sys/class/drm").glob("card*/device") if read_or_empty(path / "vendor") == AMD]
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    minors = {parse_counters(node).get("drm_render_minor", 0) for node in nodes} - {0}
    if minors:
        found = [path for path in found if any((path / f"drm/renderD{minor}").exists() for minor in minors)]
    found.sort(key=lambda path: (len(path.parent.name), path.parent.name))
    chosen = [card(index, path) for index, path in enumerate(found)]
    second = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", second):
        if variable in os.environ:
            names = named_devices(os.environ[variable])
            chosen = [card for number, card in enumerate(chosen) if str(number) in names or card.uuid in names]
    return chosen


def card(index: int, path: Path) -> AmdDevice:
    """Return the GPU with ROCm's UUID, which contains ``index`` if the GPU has no unique id."""
    name = read_or_empty(path / "product_name") or f"AMD GPU {read_or_empty(path / 'device')}".strip()
    return AmdDevice(path, f"GPU-{read_or_empty(path / 'unique_id') or index}", index, name)


def reading(card: AmdDevice) -> DeviceReading:
    path = card.path
    monitor = next(iter(sorted(path.glob("hwmon/hwmon*"))), path / "hwmon")
    used, limit = number(path / "mem_info_vram_used", 1), number(path / "mem_info_vram_total", 1)
    power = number(monitor / "power1_average", 1e-6)
    return DeviceReading(
        card.uuid,
        card.index,
        card.name,
        up=path.exists(),
        busy=number(path / "gpu_busy_percent", 0.01),
        memory_used_bytes=None if used is None else int(used),
        memory_limit_bytes=None if limit is None else int(limit),
        power_watts=number(monitor / "power1_input", 1e-6) if power is None else power,
        temperature_celsius=number(monitor / "temp1_input", 1e-3),
        sm_clock_hertz=number(monitor / "freq1_input", 1),
    )


def number(path: Path, factor: float) -> float | None:
    text = read_or_empty(path)
    return int(text) * factor if text.isdecimal() else None
