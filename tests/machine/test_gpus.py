"""The number of GPUs of a pod, from a made-up /sys that refuses the same reads as the kernel."""

from pathlib import Path

import pytest

from slipstream.shared.machine import gpus
from slipstream.shared.machine.nvml import NvmlDevice, visible_devices
from tests.support.fake_nvml import see_four_gpus

WHOLE = [NvmlDevice("handle", f"GPU-a{index}", index, "whole", "card", f"GPU-a{index}") for index in range(3)]
PARTITIONS = [
    NvmlDevice("handle", f"MIG-b{number}", 3, "part", "card", "GPU-b3", number, divided=True) for number in (1, 2)
]
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, and no NVIDIA driver."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(gpus, "ask_nvml", lambda question: None)


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    """The topology of a machine with two CPUs and eight MI300X: nodes 2 to 9."""
    for node in range(10):
        directory = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node)
        directory.mkdir(parents=True)
        simds = 0 if node < 2 else 1216
        (directory / "properties").write_text(f"cpu_cores_count {0 if simds else 96}\nsimd_count {simds}\n")
    return tmp_path


def deny(monkeypatch: pytest.MonkeyPatch, denied: set[str]) -> None:
    """Refuse to read of these nodes as ``node_show`` does of GPUs outside of the device cgroup: EPERM on reading."""
    read_text = Path.read_text

    def guarded(path: Path, encoding: str) -> str:
        if path.name == "properties" and path.parent.name in denied:
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_text(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", guarded)


def test_a_pod_with_some_of_a_machines_gpus_counts_those(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.visible_gpus(eight) == 8
    deny(monkeypatch, {"2", "3", "5", "6", "7", "9"})
    assert gpus.visible_gpus(eight) == 2


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f7d3e8a60,GPU-4b2c1a9f7d3e8a61"}, 2),
        ({"ROCR_VISIBLE_DEVICES": ""}, 0),
        ({"HIP_VISIBLE_DEVICES": "4,5"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1,2", "CUDA_VISIBLE_DEVICES": "0"}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,-1,2"}, 1),
    ],
)
def test_variables_hide_gpus_of_amd(
    eight: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], visible: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert gpus.visible_gpus(eight) == visible


def test_no_variable_adds_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpus.visible_gpus(tmp_path) == 0


def test_variables_of_amd_hide_none_of_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    see_four_gpus(monkeypatch)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    assert gpus.visible_gpus() == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert gpus.visible_gpus() == 2


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, [["GPU-a0"], ["GPU-a1"], ["GPU-a2"], ["MIG-b1", "MIG-b2"]]),
        ("", []),
        ("2,0", [["GPU-a2"], ["GPU-a0"]]),
        (" 1 ,, 0", [["GPU-a1"]]),
        ("1,-1,0", [["GPU-a1"]]),
        ("1,9,0", [["GPU-a1"]]),
        ("GPU-a2,GPU-a0", [["GPU-a2"], ["GPU-a0"]]),
        ("GPU-b", [["MIG-b1", "MIG-b2"]]),
        ("MIG-b2,1", [["MIG-b2"], ["GPU-a1"]]),
        ("GPU-a", []),  # ambiguous
        ("MIG-b", []),
        ("0,GPU-none,1", [["GPU-a0"]]),
        ("1,0,1", []),
        ("GPU-a1,1", []),
    ],
)
def test_entries_are_numbers_or_the_beginning_of_one_uuid(visible: str | None, uuids: list[list[str]]) -> None:
    found = visible_devices([*WHOLE, *PARTITIONS], visible)
    assert [[device.uuid for device in devices] for devices in found] == uuids
