"""GPU driver queried in its own thread, so that a hanging driver costs only its devices' fields."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from slipstream.shared.logs import logger
from slipstream.shared.telemetry.records import DeviceReading

Readings = tuple[DeviceReading, ...]
log = logger("telemetry")


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
