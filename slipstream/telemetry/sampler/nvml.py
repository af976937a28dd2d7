"""Readings of NVIDIA GPUs and partitions (MIG) from NVML.

Fields that driver or device do not support are None. A call may also never return, so callers that must not block use a
separate thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from slipstream.machine.gpus import named_devices
from slipstream.telemetry.records import THROTTLED, DeviceReading

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
#: NVML's errors for a device that is lost until a reset or reboot.
GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
#: Seconds between searches for devices while there are none.
AGAIN_S = 30.0


class Gone(Exception):
    """Error for a lost device."""


@dataclass
class Device:
    """GPU or partition."""

    #: None if the device was already lost when it was listed.
    handle: Any
    uuid: str
    index: int
    name: str
    #: Handle and UUID of the whole GPU, and the partition's GPU instance id (None for a GPU).
    card: Any = None
    card_uuid: str = ""
    instance: int | None = None
    #: Pair of NVML samples between which multiprocessor activity is measured; None where unsupported.
    earlier: Any = None
    later: Any = None

    def names(self) -> DeviceReading:
        return DeviceReading(self.uuid, self.index, self.name, up=False)


class NvidiaDevices:
    """GPUs that CUDA_VISIBLE_DEVICES selects."""

    def __init__(self) -> None:
        self._devices: list[Device] = []
        self._look_at = 0.0

    def read(self) -> tuple[DeviceReading, ...]:
        """Return the current reading of every device; empty without a driver."""
        if not self._devices and time.monotonic() >= self._look_at:
            self._devices = look()
            self._look_at = time.monotonic() + AGAIN_S
        return tuple(map(reading, self._devices))


def look() -> list[Device]:
    """Return the visible devices."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return []
    devices = [device for index in range(count) for device in devices_of(index)]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        devices = visible(devices, named_devices(os.environ["CUDA_VISIBLE_DEVICES"]))
    for device in devices:
        start_samples(device)
    return devices


def devices_of(index: int) -> Iterator[Device]:
    """Yield the GPU with number ``index``, or its partitions if it has any."""
    try:
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(card)
        whole = Device(card, uuid, index, pynvml.nvmlDeviceGetName(card), card, uuid)
        found = list(partitions_of(whole)) or [whole]
    except (pynvml.NVMLError, Gone):  # lost before its names were read: only the index is known
        found = [Device(None, f"GPU-{index}", index, "")]
    yield from found


def partitions_of(whole: Device) -> Iterator[Device]:
    mode = answer(lambda: pynvml.nvmlDeviceGetMigMode(whole.card)[0])
    if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
        return
    for number in range(answer(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(whole.card)) or 0):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole.card, number)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
        except pynvml.NVMLError:
            continue  # unused index
        name = answer(lambda: pynvml.nvmlDeviceGetName(handle)) or whole.name  # noqa: B023
        instance = answer(lambda: pynvml.nvmlDeviceGetGpuInstanceId(handle))  # noqa: B023
        yield Device(handle, uuid, whole.index, name, whole.card, whole.uuid, instance)


def visible(devices: list[Device], named: list[str]) -> list[Device]:
    """Return the devices that CUDA_VISIBLE_DEVICES names by number or UUID prefix."""
    numbers = {int(name) for name in named if name.isdecimal()}
    uuids = tuple(name for name in named if not name.isdecimal())
    return [
        device
        for device in devices
        if device.index in numbers or device.uuid.startswith(uuids) or device.card_uuid.startswith(uuids)
    ]


def answer(call: Callable[[], T]) -> T | None:
    """Return the result of an NVML call; None if driver or device do not support it.

    Raises ``Gone`` if the device is lost.
    """
    try:
        return call()
    except pynvml.NVMLError as error:
        if error.value in GONE:
            raise Gone from None
        return None
    except pynvml.NVMLLibraryMismatchError:  # not an NVMLError; the driver may lack the call
        return None


def reading(device: Device) -> DeviceReading:
    if device.handle is None:
        return device.names()
    try:
        return present(device)
    except Gone:
        return device.names()


def present(device: Device) -> DeviceReading:
    """Return a device's reading.

    Raises ``Gone`` as :func:`answer`.
    """
    handle = device.handle
    memory = answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2))
    memory = memory or answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    clock = answer(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    return DeviceReading(
        device.uuid,
        device.index,
        device.name,
        busy=scaled(answer(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), 0.01),
        sm_active=sm_active(device),
        memory_used_bytes=int(memory.used) if memory else None,
        memory_limit_bytes=int(memory.total) if memory else None,
        power_watts=scaled(answer(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)), 1e-3),
        energy_joules=scaled(answer(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)), 1e-3),
        temperature_celsius=scaled(
            answer(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)), 1.0
        ),
        sm_clock_hertz=scaled(clock, 1e6),
        throttled=throttled(handle),
        io_bytes=io_bytes(handle),
    )


def scaled(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def throttled(handle: object) -> tuple[str, ...]:
    bits = answer(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if bits is None:  # its name before driver 535
        bits = answer(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return tuple(reason for bit, reason in enumerate(THROTTLED, FIRST_REASON) if (bits or 0) >> bit & 1)


def io_bytes(handle: object) -> dict[tuple[str, str], float]:
    asked = [(field, scope) for _, _, field, scope, _ in FIELDS]
    values = answer(lambda: pynvml.nvmlDeviceGetFieldValues(handle, asked)) or []
    return {
        (link, direction): float(getattr(value.value, MEMBERS[value.valueType])) * unit
        for (link, direction, _, _, unit), value in zip(FIELDS, values, strict=False)
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType in MEMBERS
    }


# Multiprocessor activity (GPM, since Hopper)


def start_samples(device: Device) -> None:
    try:
        supported = device.card and answer(lambda: pynvml.nvmlGpmQueryDeviceSupport(device.card).isSupportedDevice)
        if supported:
            device.earlier, device.later = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
            take_sample(device, device.earlier)
    except (Gone, pynvml.NVMLError):
        device.earlier = device.later = None


def take_sample(device: Device, sample: object) -> None:
    if device.instance is None:
        pynvml.nvmlGpmSampleGet(device.card, sample)
    else:
        pynvml.nvmlGpmMigSampleGet(device.card, device.instance, sample)


def sm_active(device: Device) -> float | None:
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

    share = answer(measure)
    device.earlier, device.later = device.later, device.earlier
    return share
