"""Processes that are forked from a server which has loaded what they need: torch and flytekit alone take 4 s.

The first of them starts the server, which loads once what each of them would load for itself; all later ones start in a
hundredth of a second. The server does no work, so it has no threads and has touched no GPU: what is forked from it is a
fresh process.
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

from slipstream.distributed.child_processes import no_main_module

CONTEXT = multiprocessing.get_context("forkserver")
#: Loaded first: ends the server with the process that started it.
FIRST = "slipstream.distributed.forked"
#: Loaded last: nothing of all this is garbage.
LAST = "slipstream.distributed.frozen"
#: Variables with these beginnings are read while libraries are loaded.
READ_WHEN_LOADED = (
    *("ATEN_", "CUDA_", "GLOO_", "GOMP_", "HIP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_"),
    *("OPENBLAS_", "PYTHON", "PYTORCH_", "ROCR_", "TORCH_"),
)

#: Bytes of a temporary directory that leave room for the names in it: "/pymp-…/listener-…".
LONGEST_TMPDIR = 107 - 32
SYSTEMS_OWN = "/tmp"

#: Of the server that :func:`start` started: what it read while it loaded.
_started_with: dict[str, str] | None = None


def start(modules: Sequence[str]) -> None:
    """Start the server of this process, which loads ``modules`` while this process goes on.

    One that runs is kept, whatever it has loaded, unless a variable that counts while libraries are loaded has another
    value now: then it is ended, and with it what was forked from it.
    """
    global _started_with
    counts = read_when_loaded(os.environ)
    # multiprocessing has no other way to end its server but to wait for all that was forked from it.
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None and _started_with != counts:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        os.waitpid(server._forkserver_pid, 0)
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    CONTEXT.set_forkserver_preload([FIRST, *modules, LAST])
    make_room_for_sockets()
    # A module of the user's working directory is none of these, whatever its name.
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
    """multiprocessing puts its sockets below the temporary directory, and a socket's path has at most 107 bytes. If
    ``TMPDIR`` leaves no room for their names they lie in the system's own directory (as in Python 3.14, gh-132124)."""
    if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_TMPDIR:
        return
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if len(os.fsencode(config.get("tempdir") or "x" * 108)) > LONGEST_TMPDIR:
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=SYSTEMS_OWN)
        util.Finalize(None, shutil.rmtree, (config["tempdir"], True), exitpriority=-100)


def read_when_loaded(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_WHEN_LOADED)}


def process(target: Callable[..., object], arguments: tuple[object, ...]) -> BaseProcess:
    """A started process that runs ``target(*arguments)`` as one of this moment would: :class:`AsNow`."""
    child = CONTEXT.Process(target=AsNow(target), args=arguments)
    with no_main_module():
        child.start()
    return child


class AsNow:
    """A function that runs in a forked process with this process's environment, standard output and standard error;
    the server has those of the moment when it was started."""

    def __init__(self, target: Callable[..., object]) -> None:
        functools.update_wrapper(self, target)
        self.target = target

    def __getstate__(self) -> dict[str, object]:
        """Made while a process is started."""
        sys.stdout.flush()
        sys.stderr.flush()
        return {"target": self.target, "environment": dict(os.environ), "streams": [DupFd(1), DupFd(2)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.target, self._environment = state["target"], state["environment"]
        self._streams: list[int] = [stream.detach() for stream in state["streams"]]

    def __call__(self, *arguments: object) -> object:
        from slipstream.distributed import forked

        for number, stream in enumerate(self._streams, start=1):
            os.dup2(stream, number)
            os.close(stream)
        # torch elastic tells each worker its rank by variables that it sets in it.
        told = {name: value for name, value in os.environ.items() if forked.ENVIRONMENT.get(name) != value}
        os.environ.clear()
        os.environ.update(self._environment | told)
        return self.target(*arguments)
