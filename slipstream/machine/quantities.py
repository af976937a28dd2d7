"""Kubernetes quantities: ``"500m"`` of a CPU, ``"16Gi"`` of memory."""

from __future__ import annotations

import os
import re

SCALES = {
    "m": 1e-3,
    "": 1.0,
    **{unit: 1000.0**power for power, unit in enumerate("kMGTP", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTP", 1)},
}
QUANTITY = re.compile(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(SCALES)})")


def parse_quantity(text: str) -> float:
    """The number that a quantity stands for: CPUs or bytes. Raises ``ValueError`` if it is none."""
    found = QUANTITY.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no Kubernetes quantity")
    return float(found[1]) * SCALES[found[2]]


def quantity_in_environment(variable: str) -> float | None:
    """The quantity that an environment variable holds; None if it is unset."""
    text = os.environ.get(variable)
    return parse_quantity(text) if text else None
