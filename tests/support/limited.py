"""Limits of CPU time and memory for a block of a test, in its own process."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.little_memory import data_bytes

#: What reading an input may take more than starting the command.
CPU_S, BYTES = 5.0, 1 << 30


class TooMuch(BaseException):
    """Ends a block that takes more CPU time than it may; nothing on the way takes it for an error of its own."""


@contextmanager
def limited(seconds: float = CPU_S, more_bytes: int = BYTES) -> Iterator[None]:
    """Raise ``AssertionError`` for a block that takes more CPU time. Where it allocates too much it has
    ``MemoryError``."""

    def end(*_: object) -> None:
        raise TooMuch

    before, kept = signal.signal(signal.SIGPROF, end), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes(os.getpid()) + more_bytes, kept[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except TooMuch:
        raise AssertionError(f"took more than {seconds:g} s of CPU time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, kept)
        signal.signal(signal.SIGPROF, before)
