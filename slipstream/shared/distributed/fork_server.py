"""Fork server that preloads libraries for child processes: torch and flytekit alone take 4 s.

The first child starts the server, which imports all libraries once; later children start in 10 ms. The server has no
threads and has used no GPU, so forking it is safe.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

from slipstream.shared.distributed.child_processes import end_with_parent, no_main_module

CONTEXT = multiprocessing.get_context("forkserver")
#: Module to load first: it ends the server with the process that started the server.
FIRST = "slipstream.shared.distributed.fork_server"
#: Module to load last: it excludes all loaded objects from garbage collection.
LAST = "slipstream.shared.distributed.frozen"
#: Prefixes of environment variables that libraries read while they are loaded.
READ_WHEN_LOADED = (
    *("ATEN_", "CUDA_", "GLOO_", "GOMP_", "HIP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_"),
    *("OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCH_"),
)

#: Maximum bytes of a temporary directory's path that leave room for "/pymp-…/listener-…".
LONGEST_TMPDIR = 107 - 32
SYSTEMS_OWN = "/tmp"

#: Values of the variables with these prefixes when :func:`start_fork_server` started the server; None before.
_started_with: dict[str, str] | None = None


def start_fork_server(modules: Sequence[str]) -> None:
    """Start this process's server, which loads ``modules`` in the background.

    A running server is kept, whatever it has loaded, unless a variable that libraries read while loading has changed.
    The old server is then killed with its children, and a new one starts.
    """
    global _started_with
    counts = read_when_loaded(os.environ)
    # Private attributes, because multiprocessing can only end its server by waiting for all its children.
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None and _started_with != counts:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver_pid, 0)
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    CONTEXT.set_forkserver_preload([FIRST, *modules, LAST])
    make_room_for_sockets()
    # Otherwise a module in the user's working directory could be loaded instead of one with the same name.
    safe = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        server.ensure_running()
    finally:
        if safe is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe
    _started_with = counts


def make_room_for_sockets() -> None:
    """Shorten multiprocessing's temporary directory if socket paths in it would exceed 107 bytes.

    If ``TMPDIR`` is too long, the directory is created in ``/tmp`` (as in Python 3.14, gh-132124).
    """
    if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_TMPDIR:
        return
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if len(os.fsencode(config.get("tempdir") or "x" * 108)) > LONGEST_TMPDIR:
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=SYSTEMS_OWN)
        util.Finalize(None, shutil.rmtree, (config["tempdir"], True), exitpriority=-100)


def read_when_loaded(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_WHEN_LOADED)}


def start_process(target: Callable[..., object], arguments: tuple[object, ...]) -> BaseProcess:
    """Start a child process that runs ``target(*arguments)`` with the current environment (:class:`ForkedCall`)."""
    child = CONTEXT.Process(target=ForkedCall(target), args=arguments)
    with no_main_module():
        child.start()
    return child


class ForkedCall:
    """Function that runs in a forked process with the caller's environment and standard streams.

    Otherwise it would inherit those of the server's start.
    """

    def __init__(self, target: Callable[..., object]) -> None:
        functools.update_wrapper(self, target)
        self.target = target

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle when a process starts, with environment and streams."""
        sys.stdout.flush()
        sys.stderr.flush()
        return {"target": self.target, "environment": dict(os.environ), "streams": [DupFd(1), DupFd(2)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.target, self._environment = state["target"], state["environment"]
        self._streams: list[int] = [stream.detach() for stream in state["streams"]]

    def __call__(self, *arguments: object) -> object:

        for number, stream in enumerate(self._streams, start=1):
            os.dup2(stream, number)
            os.close(stream)
        # Keep variables that torch elastic has set in this child, such as its rank.
        told = {name: value for name, value in os.environ.items() if ENVIRONMENT.get(name) != value}
        os.environ.clear()
        os.environ.update(self._environment | told)
        return self.target(*arguments)


# It ends the server with the process that started it. The server would not detect that process's end by its pipe, which
# its children keep open.
# c10d logs long warnings about lost peers, which this project reports in one line. torch reads this when it is loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
#: Environment of the server at its start.
ENVIRONMENT = dict(os.environ)

end_with_parent()
