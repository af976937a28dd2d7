"""Comparison of the measured gradient exchange with the interconnect profile."""

from __future__ import annotations

import numpy as np

from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.devices import COMMUNICATION, Bottleneck
from slipstream.shared.interconnect.profile import NetworkProfile
from slipstream.shared.telemetry.bottleneck import WORTH_A_LOOK


def expected_exchange(profile: NetworkProfile, exchanged_bytes: int) -> float | None:
    """Return the expected seconds of an all_reduce of ``exchanged_bytes``; None if all_reduce was not measured.

    Interpolates linearly between measured sizes; above the largest size, its bandwidth is assumed.
    """
    measured = profile.of("all_reduce")
    if not measured:
        return None
    sizes, seconds = [m.bytes for m in measured], [m.p50 for m in measured]
    if exchanged_bytes > sizes[-1]:
        return seconds[-1] * exchanged_bytes / sizes[-1]
    return float(np.interp(exchanged_bytes, sizes, seconds))


def against_interconnect(found: Bottleneck, profile: NetworkProfile) -> str:
    """Compare the gradient exchange with the interconnect in a sentence; "" if the exchange took little time.

    ``profile`` must be measured with the same processes.
    """
    if found.shares.get(COMMUNICATION, 0.0) < WORTH_A_LOOK or not found.exchanged_bytes:
        return ""
    expected = expected_exchange(profile, found.exchanged_bytes)
    if expected is None:
        return ""
    needed, waited = fmt.duration(expected), fmt.duration(found.least_exchange_s)
    return (
        f"The measured interconnect needs {needed} for an all_reduce of {fmt.file_size(found.exchanged_bytes)}; every "
        f"rank waited at least {waited} for it after its last gradient."
    )
