"""A pod: one container as a process, from its start to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support import REPOSITORY

#: Kubernetes' default, where the pod does not say otherwise.
GRACE_S = 30.0
#: No pod of a test takes as long, on a busy machine either.
STUCK_S = 600.0


class Pod:
    """A running container. When its main process ends, for whatever reason, so does everything that it started.

    Its main process leads a session, but is not the first of a PID namespace, so that SIGTERM ends it at once where it
    handles none; in a container it would go on until the grace period is over.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes] | BaseProcess, log: Path, grace_s: float) -> None:
        self.name, self.process, self.log, self.grace_s = name, process, log, grace_s
        self.started, self.ended = time.time(), 0.0
        self.exit_code: int | None = None
        #: What was done to it from outside.
        self.struck = ""
        self.deleted = False
        self.waiting = threading.Thread(target=self.wait, daemon=True)
        self.waiting.start()

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        grace_s: float = GRACE_S,
    ) -> Pod:
        """Run a command in a directory of its own, with this machine's interpreter and libraries."""
        (directory / "tmp").mkdir(parents=True)
        machine = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            "TMPDIR": str(directory / "tmp"),
            "PYTHONPATH": str(REPOSITORY),  # as in the image
        }
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env={**machine, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(name, process, directory / "log", grace_s)

    def wait(self) -> None:
        code = self.process.wait() if isinstance(self.process, subprocess.Popen) else joined(self.process)
        self.kill()
        self.ended, self.exit_code = time.time(), code

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def finish(self) -> str:
        """What it printed, once it has ended. Raises ``AssertionError`` if it hangs."""
        self.waiting.join(STUCK_S)
        assert not self.running, f"{self.name} hangs:\n{self.said()}"
        return self.said()

    def said(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def terminate(self) -> None:
        """SIGTERM, and SIGKILL when the grace period is over."""
        self.process.terminate()
        timer = threading.Timer(self.grace_s, self.kill)
        timer.daemon = True
        timer.start()

    def delete(self) -> None:
        """What ``kubectl delete pod``, a drained node and a cleaning operator do."""
        self.deleted = True
        self.terminate()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        assert self.process.pid
        return self.process.pid


def joined(process: BaseProcess) -> int:
    process.join()
    assert process.exitcode is not None
    return process.exitcode
