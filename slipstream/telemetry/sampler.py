"""The sampler: one process per pod that looks each second at devices and host, and keeps and serves what it sees.

    python -m slipstream.telemetry.sampler DIRECTORY --execution … --task … --attempt … --node … --parent PID

A child of the agent (:mod:`slipstream.telemetry.watch`). It ends on SIGTERM, and by itself when that process is gone.
Drivers are asked in threads of their own, as they may never answer: that costs the fields of their devices, and nothing
else. It loads neither torch nor NumPy, and whoever adds an import measures: 5 ms of CPU a second, 40 MB.
"""

from __future__ import annotations

import argparse
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.logs import logger
from slipstream.telemetry.amd import AmdDevices
from slipstream.telemetry.host import Host
from slipstream.telemetry.metrics import Labels, exposition
from slipstream.telemetry.nvml import NvidiaDevices
from slipstream.telemetry.records import DeviceReading, Sample
from slipstream.telemetry.ring import Ring
from slipstream.telemetry.server import VARIABLE, serve
from slipstream.telemetry.totals import NodeCounter, NodeTotals, read_totals, write_node

INTERVAL_S = 1.0
#: Seconds in which a driver has to answer.
DRIVER_S = 0.5
Readings = tuple[DeviceReading, ...]
log = logger("telemetry")


class Driver:
    """A driver that is asked in a thread, by ``read``, which may block or fail."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read
        self._questions: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Readings] = queue.SimpleQueue()
        self._is_asked = False
        self._known: dict[str, DeviceReading] = {}
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self) -> bool:
        """Ask for readings, unless the driver still owes an earlier answer."""
        if self._is_asked:
            try:
                self._answers.get_nowait()  # that came too late
            except queue.Empty:
                return False
        self._is_asked = True
        self._questions.put(None)
        return True

    def answer(self, within: float) -> Readings:
        """What was asked for, waiting for it so many seconds. Devices that are missing are not up."""
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
                    log.warning("a driver's readings are missing: %r", error)
                is_told, readings = True, ()
            self._answers.put(readings)


@dataclass(frozen=True)
class State:
    """What is served."""

    sample: Sample | None = None
    node: NodeTotals = NodeTotals()


class Sampler:
    """Samples into ``directory``; ``prices`` are dollars per hour of this node, by name."""

    def __init__(self, directory: Path, watched: int, prices: dict[str, float]) -> None:
        self.state = State()
        self._directory = directory
        self._host = Host(watched)
        self._drivers = [Driver(NvidiaDevices().read), Driver(AmdDevices().read)]
        self._ring = Ring(directory)
        self._counter = NodeCounter(prices)
        self._before = time.monotonic()
        self._is_told = False

    def sample(self) -> None:
        """Take a sample and keep it. A disk that takes none is told of once."""
        until = time.monotonic() + DRIVER_S
        asked = [driver.ask() for driver in self._drivers]
        host = self._host.read()
        devices = [
            reading
            for driver, waits in zip(self._drivers, asked, strict=True)
            for reading in driver.answer(until - time.monotonic() if waits else 0.0)
        ]
        sample, now = Sample(time.time(), host, tuple(devices)), time.monotonic()
        self.state = State(sample, self._counter.add(sample, now - self._before))
        self._before = now
        try:
            self._ring.add(sample)
            write_node(self._directory, self.state.node)
        except OSError as error:
            if not self._is_told:
                log.warning("samples cannot be kept in %s: %s", self._directory, error.strerror or error)
            self._is_told = True


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    ended = end_of_process()
    labels = Labels(given.execution, given.task, given.attempt, given.node)
    try:
        sampler = Sampler(given.directory, given.parent, dict(given.price))
    except OSError as error:
        log.warning("no samples are taken: %s: %s", given.directory, error.strerror)
        return

    def text() -> str:
        state = sampler.state
        return exposition(state.sample, state.node, read_totals(given.directory), labels)

    if os.environ.get(VARIABLE):
        serve(os.environ[VARIABLE], text)
    at = time.monotonic()
    while os.getppid() == given.parent:
        sampler.sample()
        at = max(at + INTERVAL_S, time.monotonic())
        if select.select([ended], [], [], max(0.0, at - time.monotonic()))[0]:
            sampler.sample()  # the end of what is counted
            break


def end_of_process() -> int:
    """A file descriptor that becomes readable with SIGTERM. Ctrl-C is the agent's, which then ends this process."""
    ended, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ended


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slipstream.telemetry.sampler")
    parser.add_argument("directory", type=Path)
    for name in ("execution", "task", "node"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="the process that this one ends with")
    parser.add_argument("--price", type=price, action="append", default=[], metavar="NAME=DOLLARS_PER_HOUR")
    return parser.parse_args(arguments)


def price(text: str) -> tuple[str, float]:
    name, _, dollars = text.rpartition("=")
    return name, float(dollars)


if __name__ == "__main__":
    main(sys.argv[1:])
