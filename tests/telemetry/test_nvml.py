"""NVIDIA devices in the sampler: all readings, none, some, and lost devices."""

from pathlib import Path

import pytest

from slipstream.shared.telemetry.records import DeviceReading
from tests.support.fake_nvml import FakeNvml, plain


def test_a_device_has_everything(nvml: FakeNvml) -> None:
    first, second = nvml.readings(count=3)
    joules = first.pop("energy_joules")
    assert joules > 0
    assert first == {
        "uuid": "GPU-00000000-0000",
        "index": 0,
        "name": "Fake 100",
        "up": True,
        "busy": pytest.approx(0.60),
        "sm_active": pytest.approx(0.30),
        "memory_used_bytes": 19_500_000_000,  # without what the driver has reserved for itself
        "memory_limit_bytes": 80_000_000_000,
        "power_watts": pytest.approx(100),
        "temperature_celsius": 55,
        "sm_clock_hertz": 1.41e9,
        "throttled": ["sw_power_cap", "hw_thermal_slowdown"],  # and idle, which is no throttling
        # Of NVLink this one counts only what goes out, in KiB.
        "io_bytes": {"pcie/out": 197_000, "pcie/in": 198_000, "nvlink/out": 138_000 * 1024},
    }
    assert (second["index"], second["busy"]) == (1, pytest.approx(0.61))


def test_partitions_are_devices_in_the_place_of_their_gpu(nvml: FakeNvml) -> None:
    nvml.play("mig 1")
    whole, first, second = nvml.readings()
    assert [whole["uuid"], first["uuid"], second["uuid"]] == [
        "GPU-00000000-0000",
        "MIG-11000000-0000",
        "MIG-12000000-0000",
    ]
    assert first["index"] == second["index"] == 1
    assert first["memory_limit_bytes"] == 10_000_000_000
    assert (first["sm_active"], second["sm_active"]) == (pytest.approx(0.31), pytest.approx(0.32))
    assert first["busy"] is first["power_watts"] is first["energy_joules"] is None  # NVML has these of whole GPUs only


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("nvmlDeviceGetUtilizationRates", "busy"),
        ("nvmlDeviceGetPowerUsage", "power_watts"),
        ("nvmlDeviceGetFieldValues", "io_bytes"),
        ("nvmlGpmQueryDeviceSupport", "sm_active"),
    ],
)
def test_a_call_that_is_not_supported_costs_its_field(nvml: FakeNvml, call: str, name: str) -> None:
    nvml.play(f"missing {call}")
    for reading in nvml.readings():
        missing = {name for name, value in reading.items() if value in (None, {}, [])}
        assert missing == {name} and reading["up"]


def test_an_old_driver_knows_less_and_calls_some_of_it_otherwise(tmp_path: Path) -> None:
    for reading in FakeNvml(tmp_path, old=True).readings():
        assert {name for name, value in reading.items() if value in (None, {}, [])} == {"sm_active", "io_bytes"}
        assert reading["throttled"] == ["sw_power_cap", "hw_thermal_slowdown"]
        assert reading["memory_used_bytes"] == 20_000_000_000


def test_a_device_that_is_gone_from_the_start_has_a_place_and_no_name(nvml: FakeNvml) -> None:
    nvml.play("lost 0")
    first, second = nvml.readings()
    assert first == plain(vars(DeviceReading("GPU-0", 0, "", up=False))) | {"throttled": []}
    assert second["up"]


def test_without_a_driver_there_are_no_devices(nvml: FakeNvml) -> None:
    nvml.play("missing nvmlInitWithFlags")
    assert nvml.readings() == []


def test_what_is_hidden_from_cuda_is_not_read(nvml: FakeNvml) -> None:
    assert [reading["index"] for reading in nvml.readings(visible="GPU-1")] == [1]
    assert nvml.readings(visible="") == []
