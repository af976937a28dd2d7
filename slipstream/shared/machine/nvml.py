"""Devices of NVIDIA's management library (``nvml`` is the module ``pynvml``) and CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, TypeVar, cast

T = TypeVar("T")
#: Seconds to wait for a driver, including its loading, on a machine with eight GPUs.
DRIVER_S = 30.0


class DriverHangs(RuntimeError):
    """Error for a driver that does not answer; another machine may succeed."""


class DeviceLost(Exception):
    """Error for a lost device."""


@dataclass(frozen=True)
class NvmlDevice:
    """Whole GPU or MIG partition."""

    #: NVML's handle; None if the GPU was already lost when it was listed.
    handle: Any
    uuid: str
    #: Number of the whole GPU.
    index: int
    name: str
    #: Handle and UUID of the whole GPU, and the partition's GPU instance id (None for a whole GPU).
    card: Any = None
    card_uuid: str = ""
    instance: int | None = None
    #: True if MIG divides the GPU; a whole GPU then has no partition.
    divided: bool = False

    @property
    def is_partition(self) -> bool:
        return self.divided and self.uuid != self.card_uuid


def list_devices(nvml: ModuleType) -> list[NvmlDevice]:
    """Return this machine's GPUs; of a divided GPU, its partitions, if any."""
    return [device for index in range(nvml.nvmlDeviceGetCount()) for device in devices_of_card(nvml, index)]


def devices_of_card(nvml: ModuleType, index: int) -> list[NvmlDevice]:
    try:
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(card), nvml.nvmlDeviceGetName(card)
        mode = answer(nvml, lambda: nvml.nvmlDeviceGetMigMode(card)[0])
        divided = mode is not None and mode == nvml.NVML_DEVICE_MIG_ENABLE
        whole = NvmlDevice(card, uuid, index, name, card, uuid, divided=divided)
        return (list(partitions_of(nvml, whole)) if divided else []) or [whole]
    except (nvml.NVMLError, DeviceLost):  # before its names were read: only the index is known
        return [NvmlDevice(None, f"GPU-{index}", index, "")]


def partitions_of(nvml: ModuleType, whole: NvmlDevice) -> Iterator[NvmlDevice]:
    for number in range(answer(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(whole.card)) or 0):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole.card, number)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:
            continue  # unused index
        name = answer(nvml, lambda: nvml.nvmlDeviceGetName(handle)) or whole.name  # noqa: B023
        instance = answer(nvml, lambda: nvml.nvmlDeviceGetGpuInstanceId(handle))  # noqa: B023
        yield NvmlDevice(handle, uuid, whole.index, name, whole.card, whole.uuid, instance, divided=True)


def visible_devices(devices: list[NvmlDevice], visible: str | None) -> list[list[NvmlDevice]]:
    """Return the devices of every entry of CUDA_VISIBLE_DEVICES (None: of every GPU).

    An entry is the number of a GPU, which stands for all its partitions, or the beginning of one UUID. As in
    ``torch.cuda._parse_visible_devices``, an invalid or ambiguous entry ends the list, a repeated one empties it.
    """
    indices = dict.fromkeys(device.index for device in devices)
    if visible is None:
        return [[device for device in devices if device.index == index] for index in indices]
    found: list[list[NvmlDevice]] = []
    for name in named_devices(visible):
        if name.isdecimal():
            chosen = [device for device in devices if device.index == int(name)]
        else:
            same = [device for device in devices if device.uuid.startswith(name)]
            chosen = same or [device for device in devices if device.card_uuid.startswith(name)]
            if len(same) > 1 or len({device.index for device in chosen}) > 1:
                break
        if not chosen:
            break
        if chosen in found:
            return []
        found.append(chosen)
    return found


def named_devices(value: str) -> list[str]:
    """Return the devices in a list of numbers or UUIDs, up to the first negative number or empty entry."""
    devices = (device.strip() for device in value.split(","))
    return list(takewhile(lambda device: device and not device.startswith("-"), devices))


def memory_info(nvml: ModuleType, handle: object) -> Any:
    """Return total, free and used bytes (if possible without the driver's reserve); None if unsupported."""
    newer = answer(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    return newer or answer(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))


def nvml_handles(nvml: ModuleType) -> Iterator[object]:
    return map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))


def answer(nvml: ModuleType, call: Callable[[], T]) -> T | None:
    """Return the result of an NVML call, or None if it is unsupported; raise :class:`DeviceLost`."""
    try:
        return call()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
            raise DeviceLost from None
        return None
    except nvml.NVMLLibraryMismatchError:  # not an NVMLError; the driver may lack the call
        return None


def ask_nvml(question: Callable[[ModuleType], T]) -> T | None:
    """Return ``question(pynvml)``; None if NVML fails; raises :class:`DriverHangs`."""
    import pynvml

    def ask() -> T | None:
        try:
            pynvml.nvmlInit()
            try:
                return question(pynvml)
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return None

    return in_time(ask)


def in_time(ask: Callable[[], T]) -> T:
    """Return ``ask()``, which queries a driver; raise :class:`DriverHangs` after :data:`DRIVER_S`.

    The call may never return. "No GPU" would be a wrong result: training would silently run on the CPU.
    """
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=work, name="driver", daemon=True).start()
    try:
        result, error = answers.get(timeout=DRIVER_S)
    except Empty:
        raise DriverHangs(
            f"NVIDIA's driver did not answer within {DRIVER_S:g} s: it hangs, as nvidia-smi would; restart this node, "
            "or keep pods off it"
        ) from None
    if error is not None:
        raise error
    return cast(T, result)
