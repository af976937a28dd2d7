"""Periodic samples of a pod, kept in a directory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.shared.logs import logger
from slipstream.shared.telemetry.records import DeviceReading, Sample
from slipstream.shared.telemetry.ring import SampleRing
from slipstream.shared.telemetry.sampler.amd import AmdDevices
from slipstream.shared.telemetry.sampler.host import HostUsage
from slipstream.shared.telemetry.sampler.nvml import NvidiaDevices
from slipstream.shared.telemetry.totals import NodeCounter, NodeTotals, write_node

Readings = tuple[DeviceReading, ...]


class DriverQuery:
    """Driver that a thread queries through ``read``, which may block or fail."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read
        self._questions: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Readings] = queue.SimpleQueue()
        self._is_asked = False
        self._known: dict[str, DeviceReading] = {}
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self) -> bool:
        """Request readings and return True; return False while an earlier request is pending."""
        if self._is_asked:
            try:
                self._answers.get_nowait()  # an answer after its timeout
            except queue.Empty:
                return False
        self._is_asked = True
        self._questions.put(None)
        return True

    def answer(self, within: float) -> Readings:
        """Return the requested readings, waiting at most ``within`` seconds.

        Known devices without a reading are returned with ``up=False``.
        """
        try:
            readings = self._answers.get(timeout=within) if within > 0 else self._answers.get_nowait()
            self._is_asked = False
        except queue.Empty:
            readings = ()
        present = {reading.uuid: reading for reading in readings}
        self._known |= present
        return tuple(
            present.get(uuid) or DeviceReading(uuid, known.index, known.name, up=False)
            for uuid, known in self._known.items()
        )

    def _work(self) -> None:
        is_told = False
        while True:
            self._questions.get()
            try:
                readings = self._read()
            except Exception as error:
                if not is_told:
                    log.warning("the readings of a driver are missing: %r", error)
                is_told, readings = True, ()
            self._answers.put(readings)


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
