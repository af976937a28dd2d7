"""Readings of NVIDIA GPUs and partitions (MIG) from NVML.

Fields that driver or device do not support are None. A call may also never return, so callers that must not block use a
separate thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from slipstream.shared.machine import nvml
from slipstream.shared.machine.nvml import DeviceLost, NvmlDevice, list_devices, visible_devices
from slipstream.shared.telemetry.records import THROTTLED, DeviceReading

T = TypeVar("T")
#: Bit of the first reason of THROTTLED in NVML; the others follow. Bit 0 means idle, which is no reason.
FIRST_REASON = 1
#: NVML's counter fields: link, direction from the GPU's view, field, scope, bytes per unit. The largest number as scope
#: means all NVLinks together. NVML's call for PCIe throughput is not used, because it blocks for 20 ms.
ALL_LINKS = 0xFFFFFFFF
FIELDS = (
    ("pcie", "out", pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, 1),
    ("pcie", "in", pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, 1),
    ("nvlink", "out", pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS, 1024),
    ("nvlink", "in", pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS, 1024),
)
#: Member of NVML's value union, by value type.
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
#: Seconds between searches for devices while there are none.
AGAIN_S = 30.0


@dataclass
class NvidiaDevice:
    """GPU or partition."""

    listed: NvmlDevice
    #: Pair of NVML samples between which multiprocessor activity is measured; None where unsupported.
    earlier: Any = None
    later: Any = None

    def names(self) -> DeviceReading:
        return DeviceReading(self.listed.uuid, self.listed.index, self.listed.name, up=False)


class NvidiaDevices:
    """GPUs that CUDA_VISIBLE_DEVICES selects."""

    def __init__(self) -> None:
        self._devices: list[NvidiaDevice] = []
        self._look_at = 0.0

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the current reading of every device; empty without a driver."""
        if not self._devices and time.monotonic() >= self._look_at:
            self._devices = list_visible_devices()
            self._look_at = time.monotonic() + AGAIN_S
        return tuple(map(reading, self._devices))


def list_visible_devices() -> list[NvidiaDevice]:
    try:
        pynvml.nvmlInit()
        listed = list_devices(pynvml)
    except pynvml.NVMLError:
        return []
    chosen = visible_devices(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices = [NvidiaDevice(each) for group in chosen for each in group]
    for device in devices:
        start_samples(device)
    return devices


def query_or_none(call: Callable[[], T]) -> T | None:
    return nvml.answer(pynvml, call)


def reading(device: NvidiaDevice) -> DeviceReading:
    if device.listed.handle is None:
        return device.names()
    try:
        return present(device)
    except DeviceLost:
        return device.names()


def present(device: NvidiaDevice) -> DeviceReading:
    """Return a device's reading.

    Raises ``DeviceLost`` as :func:`query_or_none`.
    """
    handle = device.listed.handle
    memory = nvml.memory_info(pynvml, handle)
    clock = query_or_none(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    return DeviceReading(
        device.listed.uuid,
        device.listed.index,
        device.listed.name,
        busy=scaled(query_or_none(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), 0.01),
        sm_active=sm_active(device),
        memory_used_bytes=int(memory.used) if memory else None,
        memory_limit_bytes=int(memory.total) if memory else None,
        power_watts=scaled(query_or_none(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)), 1e-3),
        energy_joules=scaled(query_or_none(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)), 1e-3),
        temperature_celsius=scaled(
            query_or_none(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)), 1.0
        ),
        sm_clock_hertz=scaled(clock, 1e6),
        throttled=throttled(handle),
        io_bytes=io_bytes(handle),
    )


def scaled(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def throttled(handle: object) -> tuple[str, ...]:
    bits = query_or_none(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if bits is None:  # its name before driver 535
        bits = query_or_none(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return tuple(reason for bit, reason in enumerate(THROTTLED, FIRST_REASON) if (bits or 0) >> bit & 1)


def io_bytes(handle: object) -> dict[tuple[str, str], float]:
    asked = [(field, scope) for _, _, field, scope, _ in FIELDS]
    values = query_or_none(lambda: pynvml.nvmlDeviceGetFieldValues(handle, asked)) or []
    return {
        (link, direction): float(getattr(value.value, MEMBERS[value.valueType])) * unit
        for (link, direction, _, _, unit), value in zip(FIELDS, values, strict=False)
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType in MEMBERS
    }


# Multiprocessor activity (GPM, since Hopper)


def start_samples(device: NvidiaDevice) -> None:
    try:
        supported = device.listed.card and query_or_none(
            lambda: pynvml.nvmlGpmQueryDeviceSupport(device.listed.card).isSupportedDevice
        )
        if supported:
            device.earlier, device.later = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
            take_sample(device, device.earlier)
    except (DeviceLost, pynvml.NVMLError):
        device.earlier = device.later = None


def take_sample(device: NvidiaDevice, sample: object) -> None:
    if device.listed.instance is None:
        pynvml.nvmlGpmSampleGet(device.listed.card, sample)
    else:
        pynvml.nvmlGpmMigSampleGet(device.listed.card, device.listed.instance, sample)


def sm_active(device: NvidiaDevice) -> float | None:
    """Return the fraction of multiprocessors with work since the last call, 0 to 1; None if unsupported."""
    if device.later is None:
        return None
    asked = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=1)
    asked.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
    asked.sample1, asked.sample2 = device.earlier, device.later

    def measure() -> float | None:
        take_sample(device, device.later)
        metric = pynvml.nvmlGpmMetricsGet(asked).metrics[0]
        return metric.value / 100 if metric.nvmlReturn == pynvml.NVML_SUCCESS else None

    share = query_or_none(measure)
    device.earlier, device.later = device.later, device.earlier
    return share
