"""Periodic samples of a pod, kept in a directory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from slipstream.shared.logs import logger
from slipstream.shared.telemetry.records import Sample
from slipstream.shared.telemetry.ring import SampleRing
from slipstream.shared.telemetry.sampler.amd import AmdDevices
from slipstream.shared.telemetry.sampler.driver import DriverQuery
from slipstream.shared.telemetry.sampler.host import HostUsage
from slipstream.shared.telemetry.sampler.nvml import NvidiaDevices
from slipstream.shared.telemetry.totals import NodeCounter, NodeTotals, write_node

#: Timeout of a driver, in seconds.
DRIVER_S = 0.5
log = logger("telemetry")


@dataclass(frozen=True)
class SamplerState:
    """Latest sample and node totals, which the metrics server reads."""

    sample: Sample | None = None
    node: NodeTotals = NodeTotals()


class Sampler:
    """Sampler that writes to ``directory``; ``prices`` are the node's dollars per hour, by price name."""

    def __init__(self, directory: Path, watched: int, prices: dict[str, float]) -> None:
        self.state = SamplerState()
        self._directory = directory
        self._host = HostUsage(watched)
        self._drivers = [DriverQuery(NvidiaDevices().read), DriverQuery(AmdDevices().read)]
        self._ring = SampleRing(directory)
        self._counter = NodeCounter(prices)
        self._before = time.monotonic()
        self._is_told = False

    def sample(self) -> None:
        """Take and store a sample; a failure to store is logged once."""
        until = time.monotonic() + DRIVER_S
        asked = [driver.ask() for driver in self._drivers]
        host = self._host.read()
        devices = [
            reading
            for driver, waits in zip(self._drivers, asked, strict=True)
            for reading in driver.answer(until - time.monotonic() if waits else 0.0)
        ]
        sample, now = Sample(time.time(), host, tuple(devices)), time.monotonic()
        self.state = SamplerState(sample, self._counter.add(sample, now - self._before))
        self._before = now
        try:
            self._ring.add(sample)
            write_node(self._directory, self.state.node)
        except OSError as error:
            if not self._is_told:
                log.warning("samples cannot be kept in %s: %s", self._directory, error.strerror or error)
            self._is_told = True
