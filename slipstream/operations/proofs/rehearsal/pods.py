"""Pod whose only container is a process, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.operations.proofs.processes import clone

Process: TypeAlias = "subprocess.Popen[bytes] | BaseProcess"
#: Toleration of a pod's specification: key, operator, value and effect.
Toleration: TypeAlias = Mapping[str, Any]
#: Kubernetes' default grace period (s), for a pod that does not set one.
GRACE_S = 30.0
#: Seconds after which a pod counts as hung; on a busy machine, too, a rehearsed pod takes less.
STUCK_S = 600.0
OOM_KILLED = "OOMKilled"
#: Adds a directory's files to /etc/flyte/secrets in a mount namespace, and becomes the container's command.
MOUNT = """
mount -t tmpfs none "$0" && mkdir -p "$0/upper/flyte" "$0/work" && cp -r "$1" "$0/upper/flyte/secrets" &&
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$0/upper,workdir=$0/work" /etc && shift && exec "$@"
"""


class PodProcess:
    """Container as a process, Pending until it begins. When its main process ends, so does all that it started.

    Unlike in a container, SIGTERM without a handler ends the main process at once: it is not the first of a PID
    namespace.
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
        #: Reason that the kubelet reports for its end, if any, and the exit code instead of its main process's.
        self.reason = ""
        self.reported: int | None = None
        #: Fault that was injected into it.
        self.struck = ""
        self.deleted = False
        #: Node that it runs on, if it was scheduled, and a callback for when it has left the node.
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
        admit: Callable[[PodProcess], None] | None = None,
    ) -> PodProcess:
        """Run a command in a new directory, with this machine's interpreter and libraries.

        It begins at once, or when a scheduler's ``admit`` lets it.
        """
        (directory / "tmp").mkdir(parents=True)
        machine = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            "TMPDIR": str(directory / "tmp"),
            "PYTHONPATH": str(clone()),  # as in the image
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
        """Wait for its end and return its output. Raises ``AssertionError`` if it hangs."""
        self.waiting.join(STUCK_S)
        assert self.ended, f"{self.name} hangs:\n{self.said()}"
        return self.said()

    def said(self) -> str:
        """Return its output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

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
        """Keep a Pending pod from ever beginning. Return True if it was Pending."""
        with self.lock:
            pending = self.pending
            self.turn.set()
        return pending

    def delete(self) -> None:
        """Delete it, as ``kubectl delete pod``, a drained node and an operator that cleans up do."""
        self.deleted = True
        self.terminate()

    def kill(self) -> None:
        if not self.withdraw() and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill_out_of_memory(self, exit_code: int) -> None:
        """Kill it as the kernel does at the container's memory limit; the kubelet reports ``exit_code``.

        137: all processes of the container end. 247: the task ends, and pyflyte-fast-execute returns its -9. 0: only a
        process that the task started ends.
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


def with_secret_files(command: Sequence[str], files: Mapping[str, str], directory: Path) -> Sequence[str]:
    """Return the command with ``files`` below its ``/etc/flyte/secrets``, which no other process sees."""
    if not files:
        return command
    for name, text in files.items():
        path = directory / "secrets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (directory / "mounted").mkdir()
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*namespaces, "sh", "-c", MOUNT, str(directory / "mounted"), str(directory / "secrets"), *command]


def joined(process: BaseProcess) -> int:
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def largest_of_session(leader: int) -> int:
    """Return the process with the most memory among the descendants of ``leader``."""
    sizes = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader and int(status.parent.name) != leader:
                sizes[int(status.parent.name)] = int(fields[21])
    return max(sizes, key=sizes.__getitem__)
