"""A limited child process contains failures, crashes, endless work, memory and output of a library."""

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from slipstream.shared.distributed.limited_process import CallFailed, CallLimits, LimitedProcess
from tests.support.wording import refuses

LIMITS = CallLimits(cpu_seconds=20, memory=1 << 30)


class Panic(BaseException):
    """No Exception, as a panic of Rust is none, and not to be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


class Library:
    """State of the child that the calls share."""

    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def process_id(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("no such\ntoken")

    def panic(self) -> None:
        raise Panic("index out of bounds")

    def exit(self) -> None:
        sys.exit(3)

    def crash(self) -> None:
        os.abort()

    def never_return(self) -> None:
        while True:
            pass

    def take_memory(self, size: int) -> int:
        return len(bytearray(size))

    def core_size(self) -> int:
        return resource.getrlimit(resource.RLIMIT_CORE)[0]

    def speak(self) -> None:
        os.write(1, b"said\n")
        os.write(2, b"panicked at\n")


@pytest.fixture
def library() -> LimitedProcess[Library]:
    return LimitedProcess(Library, 5)


def test_calls_share_what_the_child_holds(library: LimitedProcess[Library]) -> None:
    assert library.call(LIMITS, Library.add, 2) == 7
    assert library.call(LIMITS, Library.add, number=3) == 10
    assert library.call(LIMITS, Library.process_id) != os.getpid()


@pytest.mark.parametrize("function", [Library.fail, Library.panic])
def test_a_failure_is_text_and_the_child_goes_on(
    function: Callable[[Library], None], library: LimitedProcess[Library]
) -> None:
    child = library.call(LIMITS, Library.process_id)
    with refuses(CallFailed):
        library.call(LIMITS, function)
    assert library.call(LIMITS, Library.process_id) == child


@pytest.mark.parametrize("function", [Library.exit, Library.crash])
def test_an_end_is_named_and_the_next_call_starts_again(
    function: Callable[[Library], None], library: LimitedProcess[Library]
) -> None:
    library.call(LIMITS, Library.add, 2)
    with refuses(CallFailed):
        library.call(LIMITS, function)
    assert library.call(LIMITS, Library.add, 1) == 6
    assert library.call(LIMITS, Library.core_size) == 0


def test_a_child_that_was_killed_between_calls_is_named(library: LimitedProcess[Library]) -> None:
    os.kill(library.call(LIMITS, Library.process_id), signal.SIGKILL)
    with refuses(CallFailed):
        library.call(LIMITS, Library.add, 1)


def test_what_cannot_be_made_fails_at_every_call() -> None:
    broken = LimitedProcess(int, "no number")
    for _ in range(2):
        with pytest.raises(CallFailed, match="invalid literal"):
            broken.call(LIMITS, int.bit_length)


def test_time_of_the_processor_is_limited_for_each_call(library: LimitedProcess[Library]) -> None:
    limits = CallLimits(cpu_seconds=1, memory=1 << 30)
    with refuses(CallFailed):
        library.call(limits, Library.never_return)
    assert library.call(limits, Library.add, 1) == 6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits memory")
def test_memory_is_limited_for_each_call(library: LimitedProcess[Library]) -> None:
    with pytest.raises(CallFailed, match="MemoryError"):
        library.call(CallLimits(20, 256 << 20), Library.take_memory, 512 << 20)
    assert library.call(LIMITS, Library.take_memory, 512 << 20) == 512 << 20


def test_nothing_is_printed(library: LimitedProcess[Library], capfd: pytest.CaptureFixture[str]) -> None:
    library.call(LIMITS, Library.speak)
    with pytest.raises(CallFailed):
        library.call(LIMITS, Library.crash)
    assert capfd.readouterr() == ("", "")


def test_an_interrupted_call_leaves_no_result_for_the_next(library: LimitedProcess[Library]) -> None:
    child = library.call(LIMITS, Library.process_id)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            library.call(LIMITS, Library.never_return)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert not psutil.pid_exists(child)
    assert library.call(LIMITS, Library.add, 1) == 6


def test_the_child_ends_with_the_object() -> None:
    library = LimitedProcess(Library, 5)
    child = library.call(LIMITS, Library.process_id)
    del library
    gc.collect()
    assert not psutil.pid_exists(child)


PARENT = """
import os
from slipstream.shared.distributed.limited_process import LimitedProcess, CallLimits
library = LimitedProcess(int, "5")
library.call(CallLimits(20, 1 << 30), int.bit_length)
print(*(child.pid for child in __import__("psutil").Process().children()), flush=True)
if __import__("sys").argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_the_child_ends_with_the_parent(how: str) -> None:
    found = subprocess.run([sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True, timeout=60)
    assert found.returncode == (-9 if how == "killed" else 0)
    child = int(found.stdout.split()[0])
    until = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)
