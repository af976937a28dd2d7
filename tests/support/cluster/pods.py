"""A pod: one container as a process, from its start to its end."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf.json_format import MessageToDict

from tests.support import REPOSITORY

TEMPLATE = re.compile(r"\{\{\s*[.$](\w+)\s*\}\}")
#: Kubernetes' default, where the pod does not say otherwise.
GRACE_S = 30.0
#: No pod of a test takes as long, on a busy machine either.
STUCK_S = 600.0


class Container(NamedTuple):
    """What the primary container of a task's pods runs."""

    command: list[str]
    environment: dict[str, str]
    grace_s: float


def primary_container(task: TaskTemplate) -> Container:
    if task.HasField("container"):
        container = task.container
        environment = {pair.key: pair.value for pair in container.env}
        return Container([*container.command, *container.args], environment, GRACE_S)
    spec = MessageToDict(task.k8s_pod)["podSpec"]
    name = task.config["primary_container_name"]
    (primary,) = [each for each in spec["containers"] if each["name"] == name]
    environment = {pair["name"]: pair.get("value", "") for pair in primary.get("env", [])}
    command = [*primary.get("command", []), *primary.get("args", [])]
    return Container(command, environment, float(spec.get("terminationGracePeriodSeconds", GRACE_S)))


def values_of(inputs: str, place: str, raw: str = "", previous: str = "") -> dict[str, str]:
    """Propeller's values for the templates of a command line: the address of the inputs, and the prefixes of an attempt
    that has ``place`` to itself; ``raw`` is that of its raw output, ``previous`` that of the attempt before, if there
    was one."""
    raw = raw or f"{place}/raw"
    return {
        "input": inputs,
        "outputPrefix": f"{place}/outputs",
        "rawOutputDataPrefix": raw,
        "checkpointOutputPrefix": f"{raw}/_flytecheckpoints",
        "prevCheckpointPrefix": f"{previous}/_flytecheckpoints" if previous else '""',
    }


def raw_output(base: str, execution: str, node: str, attempt: int) -> str:
    """The prefix of an attempt's raw output below ``base``: each attempt has a shard of its own, that nobody can guess
    (``taskexec_context.go: ComputeRawOutputPrefix``)."""
    name = f"{execution}-{node.replace('/', '-')}-{attempt}"
    shard = hashlib.sha256(name.encode()).hexdigest()[:2]
    return f"{base}/{shard}/{name}"


def rendered(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command line with propeller's values in its templates (``template.go``; names in any case, none unknown)."""
    lower = {name.lower(): value for name, value in values.items()}
    return [TEMPLATE.sub(lambda match: lower[match[1].lower()], part) for part in command]


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
