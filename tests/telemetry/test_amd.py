"""AMD devices, from a made-up /sys."""

from pathlib import Path

import pytest

from slipstream.shared.machine import limits
from slipstream.shared.telemetry.records import DeviceReading
from slipstream.shared.telemetry.sampler.sampling import AmdDevices

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
FILES = {
    "vendor": "0x1002",
    "product_name": "AMD Instinct MI300X",
    "gpu_busy_percent": "73",
    "mem_info_vram_used": "1000",
    "mem_info_vram_total": "205822885888",
    "hwmon/hwmon3/power1_input": "305000000",
    "hwmon/hwmon3/temp2_input": "48000",
    "hwmon/hwmon3/freq1_input": "2100000000",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Another maker's card, and three of AMD's, the last of them with a two-digit number."""
    for card, files in {0: {"vendor": "0x8086"}, 1: FILES, 2: FILES, 10: FILES}.items():
        device = tmp_path / f"sys/class/drm/card{card}/device"
        for name, text in (files | {"unique_id": f"{card:04x}", f"drm/renderD{128 + card}/dev": ""}).items():
            (device / name).parent.mkdir(parents=True, exist_ok=True)
            (device / name).write_text(f"{text}\n")
    return tmp_path


def uuids(root: Path) -> list[str]:
    return [device.uuid for device in AmdDevices(root).read()]


def test_a_device_is_read_from_its_files(root: Path) -> None:
    first, *others = AmdDevices(root).read()
    assert first == DeviceReading(
        "GPU-0001",
        0,
        "AMD Instinct MI300X",
        busy=0.73,
        memory_used_bytes=1000,
        memory_limit_bytes=205_822_885_888,
        power_watts=305.0,
        temperature_celsius=48.0,
        sm_clock_hertz=2.1e9,
    )
    assert [(device.uuid, device.index) for device in others] == [("GPU-0002", 1), ("GPU-000a", 2)]


def test_an_older_one_has_an_average_and_a_temperature_of_its_edge(root: Path) -> None:
    monitor = root / "sys/class/drm/card1/device/hwmon/hwmon3"
    (monitor / "power1_average").write_text("250000000\n")
    (monitor / "temp1_input").write_text("41000\n")
    first, *_ = AmdDevices(root).read()
    assert (first.power_watts, first.temperature_celsius) == (250, 41)


def test_a_file_that_may_not_be_read_costs_its_field(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def guarded(path: Path, encoding: str | None = None) -> str:
        if path.name == "gpu_busy_percent":
            raise PermissionError(1, "Operation not permitted", str(path))
        return read_text(path, encoding)

    monkeypatch.setattr(limits.Path, "read_text", guarded)
    assert [(device.busy, device.up, device.power_watts) for device in AmdDevices(root).read()] == [
        (None, True, 305)
    ] * 3


def test_a_missing_file_costs_its_field_and_a_missing_device_all(root: Path) -> None:
    devices = AmdDevices(root)
    cards = root / "sys/class/drm"
    (cards / "card1/device/hwmon/hwmon3/temp2_input").unlink()
    (cards / "card2").rename(cards / "gone")
    first, second, _ = devices.read()
    assert first.temperature_celsius is None and first.busy is not None
    assert second == DeviceReading("GPU-0002", 1, "AMD Instinct MI300X", up=False)


def test_a_pod_sees_its_own_of_the_nodes(root: Path) -> None:
    """The kernel lets it read of these only."""
    node = root / "sys/class/kfd/kfd/topology/nodes/3"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count 1216\ndrm_render_minor 130\n")
    assert uuids(root) == ["GPU-0002"]


def test_numbers_are_those_of_the_compute_topology(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm numbers GPUs by it, and their cards may have another order."""
    for node, minor in {1: 0, 2: 138, 3: 129, 10: 130}.items():
        properties = root / f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
        properties.parent.mkdir(parents=True)
        properties.write_text(f"simd_count {minor and 1216}\ndrm_render_minor {minor}\n")
    assert uuids(root) == ["GPU-000a", "GPU-0001", "GPU-0002"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert uuids(root) == ["GPU-000a"]


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, ["GPU-0002", "GPU-000a"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["GPU-000a"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0001"}, ["GPU-0001"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["GPU-0001"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_what_is_hidden_is_not_read(
    root: Path, environment: dict[str, str], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert uuids(root) == left


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert AmdDevices(tmp_path).read() == ()
