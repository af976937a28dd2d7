"""Devices are recognised by their names; similar names are not."""

import pytest

from slipstream.shared.machine.gpus import data_sheet_peak


@pytest.mark.parametrize(
    ("device", "kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 836e12),
        ("NVIDIA H200 NVL", "fp32", 60e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA L40S", "fp32", 91.6e12),
        ("NVIDIA L40", "bf16", 181e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-32GB", "fp16", 112e12),
        ("AMD Instinct MI300X", "bf16", 1307e12),
        ("AMD Instinct MI325X", "tf32", 653e12),
        ("NVIDIA B200", "bf16", 2250e12),
    ],
)
def test_a_device_is_known_by_its_name(device: str, kind: str, peak: float) -> None:
    assert data_sheet_peak(device, kind) == peak


def test_parts_of_a_device_and_what_is_named_like_one_are_not_known() -> None:
    assert data_sheet_peak("Tesla T4", "bf16") is None
    others = (
        "NVIDIA A10G",
        "NVIDIA GB200",
        "NVIDIA L40G",
        "NVIDIA T400 4GB",
        "NVIDIA RTX A1000",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
    )
    assert not [name for name in others if data_sheet_peak(name, "fp32")]
