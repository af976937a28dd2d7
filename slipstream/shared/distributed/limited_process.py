"""Child process with limits on CPU time and memory, for a library that reads untrusted files.

On such a file a library may panic, crash, hang or exhaust memory. A child's failure is an exception in the parent, and
its output is dropped. Calls and results are pickled only between a process and its own child.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from slipstream.shared.distributed.child_processes import no_main_module
from slipstream.shared.distributed.pool import variables_for_children

T = TypeVar("T")
P = ParamSpec("P")
Result = TypeVar("Result")

#: Children are spawned, not forked: a fork would break the threads and locks of libraries.
SPAWN = multiprocessing.get_context("spawn")
#: Exceptions that end the child process instead of being reported to the parent.
ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class CallFailed(Exception):
    """Raised if a call failed or its child ended; the message is the reason."""


@dataclass(frozen=True)
class CallLimits:
    """Limits of one call: seconds of CPU time over all threads, and bytes of memory.

    The kernel enforces CPU time on Linux and macOS, memory on Linux only.
    """

    cpu_seconds: int
    memory: int

    def __str__(self) -> str:
        return f"{self.cpu_seconds} s of CPU time and {self.memory / (1 << 30):.2g} GiB of memory"


class SpawnedChild:
    """Child process that runs ``serve(connection, *arguments)``, with a pipe to it; killed when this object is freed.

    ``variables`` are the environment variables with values for children that it gets.
    """

    def __init__(
        self, serve: Callable[..., None], *arguments: object, variables: Mapping[str, str] | None = None
    ) -> None:
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(theirs, *arguments), daemon=True)
        with no_main_module(), variables_for_children(variables or {}):
            self.process.start()
        theirs.close()
        self.kill = weakref.finalize(self, kill_child, self.process, self.connection)


class LimitedProcess(Generic[T]):
    """Child process that holds the object ``make(*arguments)`` and calls functions on it.

    It starts with the first call, and again after it was lost. It ends with this object or the parent.
    """

    def __init__(self, make: Callable[..., T], *arguments: object) -> None:
        self._make, self._arguments = make, arguments
        self._lock = threading.Lock()
        self._child: SpawnedChild | None = None

    def call(
        self, limits: CallLimits, function: Callable[Concatenate[T, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Return ``function(held, *args, **kwargs)``, computed by the child on its object within the limits.

        Raises ``CallFailed`` if the function failed or the child ended.
        """
        with self._lock:
            child = self._child or self._start(limits)
            result: Result = self._ask(child, (limits, function, args, kwargs))
            return result

    def _start(self, limits: CallLimits) -> SpawnedChild:
        self._child = SpawnedChild(answer_calls)
        self._ask(self._child, (limits, self._make, self._arguments, {}))
        return self._child

    def _ask(self, child: SpawnedChild, request: tuple[CallLimits, Any, Any, Any]) -> Any:
        limits, starting = request[0], request[1] is self._make
        try:
            child.connection.send(request)
            failed, result = child.connection.recv()
        except (EOFError, ConnectionError):
            child.process.join()
            self._lose(child)
            raise CallFailed(why_ended(child.process.exitcode, limits)) from None
        except BaseException:  # After an interrupt the next call must not receive the result of this call.
            self._lose(child)
            raise
        if failed:
            if starting:
                self._lose(child)
            raise CallFailed(result)
        return result

    def _lose(self, child: SpawnedChild) -> None:
        self._child = None
        child.kill()


def kill_child(process: BaseProcess, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()


def why_ended(exitcode: int | None, limits: CallLimits) -> str:
    """Return the reason why a child ended during a call, as text."""
    if exitcode is None or exitcode >= 0:
        return f"its process ended with exit code {exitcode}"
    if -exitcode == signal.SIGXCPU:
        return f"it took more than {limits.cpu_seconds:,} s of CPU time"
    return f"its process was ended by {signal.Signals(-exitcode).name} (its limits are {limits})"


# In the child


def answer_calls(connection: Connection) -> None:
    """Answer calls, in the child, until the parent closes the connection.

    The first call makes the object that all other calls receive.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent decides whether its Ctrl-C ends this process.
    silence_output()
    held: list[object] = []
    while True:
        try:
            limits, function, args, kwargs = connection.recv()
        except EOFError:
            return
        limit_next_call(limits)
        answer: tuple[bool, object]
        try:
            made = function(*held, *args, **kwargs)
            answer = (False, made if held else None)
            held = held or [made]
        except ENDINGS:
            raise
        except BaseException as error:  # A panic of Rust is not an Exception.
            answer = (True, error_text(error))
        connection.send(answer)


def error_text(error: BaseException) -> str:
    """Return an error as text, since pickling the error itself may fail."""
    return str(error) or type(error).__name__


def silence_output() -> None:
    """Redirect stdout and stderr to null (libraries print panics and the like), and disable core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def limit_next_call(limits: CallLimits) -> None:
    """Have the kernel end this process if the next call exceeds its limits."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + limits.cpu_seconds
    for which, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_DATA, limits.memory)):
        hard = resource.getrlimit(which)[1]
        resource.setrlimit(which, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
