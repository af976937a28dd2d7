"""How the GPUs of a machine are linked: NVLink, PCIe or xGMI, by the vendor's own tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter

#: Levels of the matrix of `nvidia-smi topo -m`, as its legend explains them.
NVIDIA = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, between host bridges",
    "SYS": "PCIe, between NUMA nodes",
}
SECONDS = 20


def links() -> list[str]:
    """``NVLink (NV18): 28 pairs``, one line for each kind of link between GPUs; empty without a vendor's tool."""
    for tool, arguments, parse in (
        ("nvidia-smi", ("topo", "-m"), nvidia_links),
        ("rocm-smi", ("--showtopotype",), amd_links),
    ):
        if not shutil.which(tool):
            continue
        try:
            said = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=SECONDS).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        return [f"{kind}: {pairs} pair{'s' if pairs > 1 else ''}" for kind, pairs in parse(said).most_common()]
    return []


def matrix(text: str) -> list[list[str]]:
    """The cells of a matrix of GPUs: ``[GPU, GPU]``, whatever columns follow; colours are removed."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    # The heading is indented.
    rows = [line.split()[1:] for line in lines if re.match(r"GPU\d+\s", line)]
    return [row[: len(rows)] for row in rows]


def pairs(cells: list[list[str]]) -> list[str]:
    """The cells above the diagonal."""
    return [cell for index, row in enumerate(cells) for cell in row[index + 1 :]]


def nvidia_links(text: str) -> Counter[str]:
    """Of the output of ``nvidia-smi topo -m``."""
    return Counter(
        f"NVLink ({cell})" if cell.startswith("NV") else NVIDIA.get(cell, cell) for cell in pairs(matrix(text))
    )


def amd_links(text: str) -> Counter[str]:
    """Of the output of ``rocm-smi --showtopotype``."""
    return Counter("PCIe" if cell == "PCIE" else "xGMI" if cell == "XGMI" else cell for cell in pairs(matrix(text)))
