"""Runs that do not fit on the visible GPUs are refused in one line before they start, with a fake NVML module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.telemetry.preflight import (
    MPS_VARIABLES,
    check_gpu_memory,
    memory_of_gpu,
    refuse_if_too_small,
    sharing_mode,
    visible_memory,
)
from tests.support.wording import refuses, same_wording

GIB = 2**30


class NVMLError(Exception):
    value = 3


@dataclass
class Device:
    """GPU, or a partition, whose UUID has the prefix MIG."""

    index: int = 0
    uuid: str = "GPU-aa"
    total: int = 80 * GIB
    used: int = 0
    #: The host's numbers of its processes; None: the driver does not say.
    pids: list[int] | None = field(default_factory=list)
    #: Of a GPU that is divided.
    partitions: list[Device | None] | None = None


class Nvml(ModuleType):
    """Behaves as pynvml does. ``old``: a driver that lacks what came later."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NotImplementedError
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 0x02000028

    def __init__(self, devices: list[Device], *, old: bool = False) -> None:
        super().__init__("pynvml")
        self.devices, self.old, self.opened = devices, old, 0

    def later(self) -> None:
        if self.old:
            raise NVMLError("Function Not Found")

    def nvmlInit(self) -> None:
        if not self.devices:
            raise NVMLError("NVML Shared Library Not Found")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        if index >= len(self.devices):
            raise NVMLError("Invalid Argument")
        return self.devices[index]

    def nvmlDeviceGetName(self, device: Device) -> str:
        return "NVIDIA A100"

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        self.later()
        return [0, 0] if device.partitions is None else [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, number: int) -> Device:
        found = (device.partitions or [])[number : number + 1]
        if not found or found[0] is None:
            raise NVMLError("Not Found")
        return found[0]

    def nvmlDeviceGetGpuInstanceId(self, device: Device) -> int:
        return 7

    def nvmlDeviceGetMemoryInfo(self, device: Device, version: int | None = None) -> Any:
        if version:
            self.later()
        return SimpleNamespace(total=device.total, free=device.total - device.used, used=device.used)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Device) -> list[Any]:
        self.later()
        if device.pids is None:
            raise NVMLError("Not Supported")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in device.pids]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nvml]:
    """Puts the stand-in in the place of pynvml, with an environment that hides nothing."""
    for name in ("CUDA_VISIBLE_DEVICES", *MPS_VARIABLES):
        monkeypatch.delenv(name, raising=False)

    def put(*devices: Device, old: bool = False) -> Nvml:
        module = Nvml(list(devices), old=old)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return put


def process(root: Path, pid: int, command: str, *opened: str) -> None:
    """A process as /proc shows it."""
    directory = root / "proc" / str(pid) / "fd"
    directory.mkdir(parents=True)
    (directory.parent / "comm").write_text(command + "\n")
    for number, target in enumerate(opened):
        (directory / str(number)).symlink_to(target)


def checked(needed: int | None = None, shared_gpu: str = "", root: Path = Path("/")) -> list[str]:
    """What stands out, if so much is needed of each GPU that is visible."""
    for gpu in visible_memory(os.environ, root):
        refuse_if_too_small(gpu, needed)
    return check_gpu_memory(shared_gpu, root)


def refused(needed: int, root: Path, shared_gpu: str = "") -> str:
    with pytest.raises(UserError) as error:
        checked(needed, shared_gpu, root)
    assert "\n" not in error.value.message
    return error.value.message


def test_free_gpus_are_no_remark_and_nvml_is_closed_again(nvml: Callable[..., Nvml], tmp_path: Path) -> None:
    module = nvml(Device(used=2**20), Device(1, "GPU-bb"))
    assert checked(79 * GIB, root=tmp_path) == []
    assert checked(root=tmp_path) == [] and module.opened == 0


def test_without_a_driver_nothing_is_said(nvml: Callable[..., Nvml], tmp_path: Path) -> None:
    nvml()
    assert checked(10**15, root=tmp_path) == []


def test_memory_that_others_hold_is_refused_with_those_that_can_be_seen(
    nvml: Callable[..., Nvml], tmp_path: Path
) -> None:
    process(tmp_path, 41, "python", "/dev/null", "/dev/nvidia0")
    # The host's number 42 is another process here, in a pod: no GPU is open in it.
    process(tmp_path, 42, "sshd", "/dev/null")
    nvml(Device(), Device(1, "GPU-bb", used=70 * GIB, pids=[41, 42, 43]))
    same_wording(refused(20 * GIB, tmp_path))
    said = ["GPU 1 (NVIDIA A100): 70 GiB are held by python (process 41), 2 processes that cannot be seen from here"]
    assert checked(10 * GIB, root=tmp_path) == said == checked(root=tmp_path)


@pytest.mark.parametrize("pids", [None, []])
def test_holders_of_which_the_driver_says_nothing(
    nvml: Callable[..., Nvml], tmp_path: Path, pids: list[int] | None
) -> None:
    nvml(Device(used=GIB, pids=pids))
    assert checked(root=tmp_path) == ["GPU 0 (NVIDIA A100): 1 GiB are held by processes that cannot be seen from here"]


def test_what_no_free_gpu_could_hold_is_refused_with_other_advice(nvml: Callable[..., Nvml], tmp_path: Path) -> None:
    nvml(Device(used=GIB))
    said = refused(81 * GIB, tmp_path)
    same_wording(said)


@pytest.mark.parametrize("visible", ["1", "GPU-bb", "GPU-b", "1,-1,0", " 1 ,,0", "1,5,0", "GPU-bb,GPU-none,GPU-aa"])
def test_only_gpus_that_are_visible_count(
    nvml: Callable[..., Nvml], tmp_path: Path, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(Device(used=80 * GIB), Device(1, "GPU-bb"))
    refused(1, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert checked(80 * GIB, root=tmp_path) == []
    assert "GPU 1" in refused(80 * GIB + 1, tmp_path)


def test_a_process_knows_its_gpu_by_the_uuid(nvml: Callable[..., Nvml], monkeypatch: pytest.MonkeyPatch) -> None:
    partition = Device(uuid="MIG-cc", total=5 * GIB)
    nvml(Device(used=GIB), Device(1, "GPU-bb", used=2 * GIB), Device(2, "GPU-dd", partitions=[partition]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,MIG-cc")
    found = [memory_of_gpu(uuid) for uuid in ("bb", "cc", "ee")]
    assert [gpu and (gpu.total_bytes, gpu.held_bytes) for gpu in found] == [(80 * GIB, 2 * GIB), (5 * GIB, 0), None]


def test_no_gpu_is_visible(nvml: Callable[..., Nvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(Device(used=80 * GIB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert checked(GIB, root=tmp_path) == []


def test_of_a_divided_gpu_the_first_partition_counts(nvml: Callable[..., Nvml], tmp_path: Path) -> None:
    first, second = Device(uuid="MIG-1", total=5 * GIB, used=GIB, pids=[7]), Device(uuid="MIG-2", total=20 * GIB)
    nvml(Device(partitions=[None, first, second]))
    assert checked(4 * GIB, root=tmp_path) == [
        "GPU 0, partition MIG-1 (NVIDIA A100): 1 GiB are held by 1 process that cannot be seen from here",
        "GPU 0, partition MIG-1 (NVIDIA A100): divided by MIG; a process uses one partition, which has 5 GiB",
    ]
    assert "4 GiB of 5 GiB are free" in refused(4 * GIB + 1, tmp_path)


def test_a_partition_that_is_named_counts(
    nvml: Callable[..., Nvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(Device(partitions=[Device(uuid="MIG-1", total=5 * GIB), Device(uuid="MIG-2", total=20 * GIB)]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    assert checked(20 * GIB, root=tmp_path)[0].startswith("GPU 0, partition MIG-2 (NVIDIA A100): divided by MIG")
    assert "partition MIG-2" in refused(21 * GIB, tmp_path)


@pytest.mark.parametrize("needed", [None, GIB])
def test_a_divided_gpu_without_a_partition_is_refused(
    nvml: Callable[..., Nvml], tmp_path: Path, needed: int | None
) -> None:
    nvml(Device(partitions=[]))
    with refuses(UserError):
        checked(needed, root=tmp_path)


def test_a_gpu_that_is_shared_is_said_to_be(
    nvml: Callable[..., Nvml], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(Device(used=2**20))
    (said,) = checked(GIB, "time-slicing", tmp_path)
    same_wording(said)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    assert "(mps)" in checked(root=tmp_path)[0]


def test_sharing_is_what_the_placement_says_or_the_environment() -> None:
    assert sharing_mode({}, "") == "" and sharing_mode({MPS_VARIABLES[2]: "0=2G"}, "") == "mps"
    assert sharing_mode({MPS_VARIABLES[0]: "/tmp/mps"}, "time-slicing") == "time-slicing"


def test_a_driver_that_lacks_what_came_later_still_counts(nvml: Callable[..., Nvml], tmp_path: Path) -> None:
    nvml(Device(used=70 * GIB, pids=[1]), old=True)
    same_wording(refused(20 * GIB, tmp_path))
