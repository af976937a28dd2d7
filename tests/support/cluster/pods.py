"""A pod: one container as a process, from its start to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf.json_format import MessageToDict

from tests.support.package import REPOSITORY

TEMPLATE = re.compile(r"\{\{\s*[.$](\w+)\s*\}\}")
#: Kubernetes' default, where the pod does not say otherwise.
GRACE_S = 30.0


def primary_container(task: TaskTemplate) -> tuple[list[str], dict[str, str], float]:
    """Command line, environment and grace period (s) of the container that a task's pods run."""
    if task.HasField("container"):
        container = task.container
        return [*container.command, *container.args], {pair.key: pair.value for pair in container.env}, GRACE_S
    spec = MessageToDict(task.k8s_pod)["podSpec"]
    name = task.config["primary_container_name"]
    (primary,) = [each for each in spec["containers"] if each["name"] == name]
    environment = {pair["name"]: pair.get("value", "") for pair in primary.get("env", [])}
    command = [*primary.get("command", []), *primary.get("args", [])]
    return command, environment, float(spec.get("terminationGracePeriodSeconds", GRACE_S))


def rendered(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command line with propeller's values in its templates (``template.go``; names in any case, none unknown)."""
    lower = {name.lower(): value for name, value in values.items()}
    return [TEMPLATE.sub(lambda match: lower[match[1].lower()], part) for part in command]


class Pod:
    """A running container. When its main process ends, for whatever reason, so does everything that it started.

    Its main process is not the first of a PID namespace, so that SIGTERM ends it at once where it handles none; in a
    container it would go on until the grace period is over.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path, grace_s: float
    ) -> None:
        self.name, self.grace_s, self.log = name, grace_s, directory / "log"
        self.started, self.ended = time.time(), 0.0
        self.exit_code: int | None = None
        #: What was done to it from outside.
        self.struck = ""
        self.deleted = False
        (directory / "tmp").mkdir(parents=True)
        machine = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            "TMPDIR": str(directory / "tmp"),
            "PYTHONPATH": str(REPOSITORY),  # in the image the project is installed
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={**machine, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.waiting = threading.Thread(target=self.wait, daemon=True)
        self.waiting.start()

    def wait(self) -> None:
        code = self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.ended, self.exit_code = time.time(), code

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)

    def terminate(self) -> None:
        """SIGTERM, and SIGKILL when the grace period is over."""
        self.send(signal.SIGTERM)
        timer = threading.Timer(self.grace_s, self.send, [signal.SIGKILL])
        timer.daemon = True
        timer.start()

    def delete(self) -> None:
        """What ``kubectl delete pod``, a drained node and a cleaning operator do."""
        self.deleted = True
        self.terminate()

    def kill(self) -> None:
        self.send(signal.SIGKILL)
