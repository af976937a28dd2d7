"""The last line of a pod's log: the cause of a failure, and never a library's complaint about open sessions."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.errors_pb2 import ErrorDocument
from flyteidl.core.literals_pb2 import Literal, LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException

from slipstream.config import RunConfig
from slipstream.flyte.failures import WorkerFailed
from slipstream.flyte.last_line import error_line
from slipstream.flyte.metadata import STAGE
from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.rendering import primary_container, rendered, values_of
from slipstream.shared.errors import UserError
from tests.support import REPOSITORY
from tests.support.faulty_s3 import FaultyS3

LIST_DATA = "tasks.prepare.list_data"
MISSING = (
    "data: '/no/such.csv' does not exist; expected a file, a directory, a glob or an address on s3://, gs:// or abfs://"
)


@dataclass
class Pods:
    """Runs a packaged task in a pod of its own."""

    bucket: S3Bucket
    template: Any
    workdir: Path
    count: int = field(default=0)

    def run(self, data: str, before: Sequence[str] = (), config: Literal | None = None) -> tuple[str, str]:
        """The log of the pod, and the place of its outputs. ``before`` is the command that starts the task's."""
        self.count += 1
        context, place = FlyteContextManager.current_context(), f"pod-{self.count}"
        given: dict[str, tuple[Any, type]] = {
            "data": (data, str),
            "target": ("", str),
            "config": (RunConfig(), RunConfig),
        }
        literals = {
            name: TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()
            for name, (value, kind) in given.items()
        }
        literals["config"].CopyFrom(config or literals["config"])
        self.bucket.write(f"{place}/inputs.pb", LiteralMap(literals=literals).SerializeToString())
        container = primary_container(self.template)
        values = values_of(self.bucket.uri(f"{place}/inputs.pb"), self.bucket.uri(place))
        environment = {**self.bucket.environment, **container.environment, "FLYTE_INTERNAL_EXECUTION_ID": "f0"}
        command = [*before, *rendered(container.command, values)]
        return PodProcess.start(place, command, environment, self.workdir / place).finish(), place


@pytest.fixture(scope="module")
def pods(
    server: FaultyS3, package_for: Callable[[str], RegistrationArchive], tmp_path_factory: pytest.TempPathFactory
) -> Pods:
    return Pods(
        S3Bucket(server.url, "last-lines"), package_for("local").tasks[LIST_DATA], tmp_path_factory.mktemp("pods")
    )


def distribution(pods: Pods) -> list[str]:
    """The command of a pod whose code was registered: it unpacks the code, here none, and starts the task's process."""
    archive = io.BytesIO()
    tarfile.open(fileobj=archive, mode="w:gz").close()
    pods.bucket.write("code/fast.tar.gz", archive.getvalue())
    unpack = ["--additional-distribution", pods.bucket.uri("code/fast.tar.gz"), "--dest-dir", "."]
    return ["pyflyte-fast-execute", *unpack, "--"]


@pytest.mark.parametrize(
    "registered", [pytest.param(False, id="packaged", marks=pytest.mark.prove), pytest.param(True, id="registered")]
)
def test_a_failed_pod_ends_with_its_cause(pods: Pods, registered: bool) -> None:
    log, outputs = pods.run("/no/such.csv", distribution(pods) if registered else ())
    assert log.splitlines()[-1].endswith(f"error: {MISSING}"), log
    assert "Unclosed" not in log
    document = pods.bucket.message(f"{outputs}/error.pb", ErrorDocument)
    assert document and document.error.message.startswith(f"{MISSING}\n\nTrace:\n")
    assert "tasks/prepare.py" in document.error.message


@pytest.mark.prove
def test_a_pod_that_has_done_its_work_complains_of_nothing(pods: Pods) -> None:
    log, outputs = pods.run("", distribution(pods))
    assert pods.bucket.keys(f"{outputs}/outputs.pb"), log
    assert "ERROR" not in log and "Unclosed" not in log


#: A process that leaves a session open in a loop of flytekit, and one in another.
OPENS = """
import asyncio, aiohttp
from flytekit.utils.asyn import run_sync
async def open_session():
    return aiohttp.ClientSession()
loop = asyncio.new_event_loop()
kept = [run_sync(open_session), loop.run_until_complete(open_session())]
"""


@pytest.mark.parametrize("of_a_task", [True, False])
def test_only_in_pods_of_this_project_open_sessions_are_ignored(of_a_task: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)} | ({STAGE: "prepare"} if of_a_task else {})
    ended = subprocess.run([sys.executable, "-c", OPENS], env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr.count("Unclosed client session") == (0 if of_a_task else 2), ended.stderr


def test_a_setting_that_the_console_sent_is_refused_in_one_line(pods: Pods) -> None:
    """flytekit's own text starts with the literal, which has thousands of characters."""
    sent = Literal()
    sent.scalar.generic.update({"training": {"epochs": 2.7}})
    log, outputs = pods.run("", config=sent)
    line = "training.epochs: 2.7 is not allowed; expected an integer"
    assert log.splitlines()[-1].endswith(f"error: {line}"), log
    document = pods.bucket.message(f"{outputs}/error.pb", ErrorDocument)
    assert document and document.error.message.startswith(f"{line}\n\n")


BOX = """
tasks.train.train FAILED
------------------------------------------------------------
Root Cause (first observed failure):
  traceback : Traceback (most recent call last):
    File "/root/slipstream/pipeline/train/run.py", line 7, in run
      1 / 0
  ZeroDivisionError: division by zero

============================================================
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("data: no such file"), "data: no such file"),
        (
            FlyteRecoverableException("the worker of rank 1 was lost to SIGKILL"),
            "the worker of rank 1 was lost to SIGKILL",
        ),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (
            RuntimeError("CUDA error: no kernel\nCompile with `TORCH_USE_CUDA_DSA`"),
            "RuntimeError: CUDA error: no kernel",
        ),
        (
            WorkerFailed(
                "rank 1 failed\nTraceback (most recent call last):\n  File \"x\", line 1\n    1 / 0\nKeyError: 'a'\n"
            ),
            "KeyError: 'a'",
        ),
        (RuntimeError(BOX), "ZeroDivisionError: division by zero"),
        (ValueError(), "ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_as_one_line(error: Exception, line: str) -> None:
    assert error_line(error) == line
