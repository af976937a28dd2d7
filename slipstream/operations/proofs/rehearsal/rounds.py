"""Propeller's rounds of an execution, and failed rounds (``controller/handler.go``).

A refused request to the object store or FlyteAdmin fails the whole round, and so does a job that the training operator
has not started within ``plugins.kf-operator.timeout``. Propeller repeats the round at once and never lowers
``status.failedAttempts``. One failed round more than ``max-workflow-retries`` ends the execution.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from slipstream.operations.proofs.rehearsal.operator import Aborted

T = TypeVar("T")
#: Flyte's default of ``propeller.max-workflow-retries``.
RETRIES = 10
#: Flyte's default of ``plugins.kf-operator.timeout`` in seconds.
OPERATOR_TIMEOUT_S = 60.0
#: Seconds from a failed round to the next, and from a good round.
AGAIN_S, ROUND_S = 0.2, 1.0


class AdminUnavailable(Exception):
    """Error of a FlyteAdmin that does not accept an event."""


class JobNotStarted(Exception):
    """Error for a job without ``status.startTime`` (``pytorch.go: GetTaskPhase``)."""


REFUSALS = (BotoCoreError, ClientError, AdminUnavailable)


class RetriesExhausted(Exception):
    def __init__(self, failed: int, retries: int, status: str) -> None:
        super().__init__(
            f"max number of system retry attempts [{failed}/{retries}] exhausted. Last known status message: {status}"
        )


class PropellerRounds:
    """Rounds of one execution. ``failed`` is its ``status.failedAttempts``; ``give_up`` is called above the limit."""

    def __init__(self, retries: int, aborted: threading.Event, give_up: Callable[[Exception], None]) -> None:
        self.retries, self.aborted, self.give_up = retries, aborted, give_up
        self.failed = 0
        self.lock, self.last = threading.Lock(), 0.0

    def through(self, step: Callable[[], T]) -> T:
        """Call ``step`` in every round until it is not refused, and return its result.

        Raises ``RetriesExhausted``, and ``Aborted`` if the execution ends meanwhile.
        """
        while True:
            try:
                return step()
            except REFUSALS as error:
                self.fail(error)
            if self.aborted.wait(AGAIN_S):
                raise Aborted

    def fail(self, error: Exception) -> None:
        """Count this round, unless another node has failed in it already."""
        with self.lock:
            if time.monotonic() - self.last >= AGAIN_S:
                self.failed, self.last = self.failed + 1, time.monotonic()
            if self.failed > self.retries:
                raise RetriesExhausted(self.failed, self.retries, f"{type(error).__name__}: {error}") from error

    @contextmanager
    def reading(self, read: Callable[[], object]) -> Iterator[None]:
        """Read the inputs of a cached node in every round while it runs.

        A refused read is "failed to read inputs when trying to query catalog"
        (``catalog/datacatalog/datacatalog.go``).
        """
        done = threading.Event()

        def rounds() -> None:
            while not done.wait(ROUND_S):
                try:
                    self.through(read)
                except (Aborted, RetriesExhausted) as error:
                    if isinstance(error, RetriesExhausted):
                        self.give_up(error)
                    return

        thread = threading.Thread(target=rounds, name="rounds", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
