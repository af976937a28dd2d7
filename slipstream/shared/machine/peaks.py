"""Peak FLOP/s of GPUs by their data sheets."""

from __future__ import annotations

import re

#: FLOP/s by words of the driver's device name, specific names first; then by precision. Sources: NVIDIA's data sheets
#: of V100, T4, A10, A100, L4, L40, L40S, H100 and H200 (half of the figures that are given "with sparsity"), AMD's of
#: MI300X.
PEAKS: dict[str, dict[str, float]] = {
    "H200 NVL": {"bf16": 836e12, "fp16": 836e12, "tf32": 418e12, "fp32": 60e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 NVL": {"bf16": 836e12, "fp16": 836e12, "tf32": 418e12, "fp32": 60e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
    "L40": {"bf16": 181e12, "fp16": 181e12, "tf32": 90.5e12, "fp32": 90.5e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "A10": {"bf16": 125e12, "fp16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "V100-PCIE": {"fp16": 112e12, "fp32": 14e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "MI300X": {"bf16": 1307e12, "fp16": 1307e12, "tf32": 653e12, "fp32": 163e12},
}
#: Word in the device name of a MIG partition, which is slower than the GPU that it is named after.
PART = "MIG "


def data_sheet_peak(device: str, kind: str) -> float | None:
    """Return the peak FLOP/s of a device in "fp32", "tf32", "bf16" or "fp16"; None if not in the table.

    Only whole words of the name count: longer names with the same prefix (A10G, T400, RTX A1000) are other GPUs.
    """
    if PART in device:
        return None
    return next((peaks.get(kind) for name, peaks in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
