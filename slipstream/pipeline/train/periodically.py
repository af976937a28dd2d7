"""Periodic background work that neither delays nor fails a training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.shared.logs import logger


@contextmanager
def call_periodically(
    work: Callable[[], None], every_s: float, last_s: float, name: str, failure: str
) -> Iterator[None]:
    """Run ``work`` every ``every_s`` seconds during the block, and once at its end, in a thread called ``name``.

    The end waits for at most ``last_s`` seconds. The first failure logs ``failure`` and the error as a warning; others
    are ignored.
    """
    ended = threading.Event()

    def repeat() -> None:
        over, said = False, False
        while not over:
            over = ended.wait(every_s)
            try:
                work()
            except Exception as error:
                if not said:
                    logger("train").warning("%s: %s", failure, error)
                said = True

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(last_s)
