"""A pod: one container as a process, from its start to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from tests.support import REPOSITORY
from tests.support.processes import largest_of_session

Process: TypeAlias = "subprocess.Popen[bytes] | BaseProcess"
#: As in a pod's specification: key, operator, value and effect.
Toleration: TypeAlias = Mapping[str, Any]
#: Kubernetes' default, where the pod does not say otherwise.
GRACE_S = 30.0
#: No pod of a test takes as long, on a busy machine either.
STUCK_S = 600.0
OOM_KILLED = "OOMKilled"


class Pod:
    """A container, Pending until it begins. When its main process ends, for whatever reason, so does everything that it
    started.

    Its main process leads a session, but is not the first of a PID namespace, so that SIGTERM ends it at once where it
    handles none; in a container it would go on until the grace period is over.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Process],
        log: Path,
        grace_s: float = GRACE_S,
        tolerations: Sequence[Toleration] = (),
    ) -> None:
        self.name, self.launch, self.log, self.grace_s, self.tolerations = name, launch, log, grace_s, tolerations
        self.process: Process | None = None
        self.started, self.ended = time.time(), 0.0
        self.exit_code: int | None = None
        #: What the kubelet says of its end: a reason, if it knows one, and a code instead of its main process's.
        self.reason = ""
        self.reported: int | None = None
        #: What was done to it from outside.
        self.struck = ""
        self.deleted = False
        #: The node that it runs on, if it was scheduled, and whom to tell that it has left it.
        self.node = ""
        self.left: Callable[[], None] = lambda: None
        self.lock, self.turn = threading.Lock(), threading.Event()
        self.waiting = threading.Thread(target=self.live, daemon=True)
        self.waiting.start()

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        grace_s: float = GRACE_S,
        tolerations: Sequence[Toleration] = (),
        admit: Callable[[Pod], None] | None = None,
    ) -> Pod:
        """Run a command in a directory of its own, with this machine's interpreter and libraries: at once, or when a
        scheduler's ``admit`` lets it."""
        (directory / "tmp").mkdir(parents=True)
        machine = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            "TMPDIR": str(directory / "tmp"),
            "PYTHONPATH": str(REPOSITORY),  # as in the image
        }

        def launch() -> Process:
            with (directory / "log").open("wb") as log:
                return subprocess.Popen(
                    command,
                    cwd=directory,
                    env={**machine, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

        pod = cls(name, launch, directory / "log", grace_s, tolerations)
        (admit or cls.begin)(pod)
        return pod

    def begin(self) -> None:
        with self.lock:
            if not self.turn.is_set():
                self.started, self.process = time.time(), self.launch()
                self.turn.set()

    def live(self) -> None:
        self.turn.wait()
        if self.process is not None:
            code = self.process.wait() if isinstance(self.process, subprocess.Popen) else joined(self.process)
            self.kill()
            self.exit_code = code if self.reported is None else self.reported
        self.ended = time.time()
        self.left()

    @property
    def pending(self) -> bool:
        return not self.turn.is_set()

    @property
    def running(self) -> bool:
        return self.process is not None and not self.ended

    def finish(self) -> str:
        """What it printed, once it has ended. Raises ``AssertionError`` if it hangs."""
        self.waiting.join(STUCK_S)
        assert self.ended, f"{self.name} hangs:\n{self.said()}"
        return self.said()

    def said(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def terminate(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace period; a Pending pod is removed at once."""
        if self.withdraw():
            return
        assert self.process
        self.process.terminate()
        timer = threading.Timer(self.grace_s, self.kill)
        timer.daemon = True
        timer.start()

    def withdraw(self) -> bool:
        """Whether it was still Pending, and now will never begin."""
        with self.lock:
            pending = self.pending
            self.turn.set()
        return pending

    def delete(self) -> None:
        """What ``kubectl delete pod``, a drained node and a cleaning operator do."""
        self.deleted = True
        self.terminate()

    def kill(self) -> None:
        if not self.withdraw() and self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill_out_of_memory(self, exit_code: int) -> None:
        """What the kernel does at the container's limit, as the kubelet then reports it.

        137: all of the container (control groups of version 2). 247: the task, whose -9 pyflyte-fast-execute hands on.
        0: one of the processes that the task started; the task itself outlives it.
        """
        self.reason = OOM_KILLED
        if exit_code:
            self.reported = exit_code
            self.kill()
        else:
            os.kill(largest_of_session(self.pid), signal.SIGKILL)

    @property
    def pid(self) -> int:
        assert self.process and self.process.pid
        return self.process.pid


def joined(process: BaseProcess) -> int:
    process.join()
    assert process.exitcode is not None
    return process.exitcode
