"""What the training operator does to the pods of a PyTorchJob, and what propeller then reads.

training-operator 1.9 (``pytorchjob_controller.go``), with an elastic policy and ``CleanPodPolicy.RUNNING``: the first
pod that exits decides, 0 is success and anything else failure; the others get SIGTERM and, after the grace period,
SIGKILL. propeller 1.16 (``plugin_manager.go``, ``remote_file_output_reader.go``): a failed job is the user's, whatever
was written, and is retried; of one that succeeded the errors are read before the outputs.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError

Process = subprocess.Popen[str] | BaseProcess
SUCCEEDED, RETRIED, FAILED = "succeeded", "retried", "failed"


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended for Flyte: ``result``, the budget that a retry of it spends, and the error's message."""

    result: str
    budget: str = ""
    message: str = ""


def operate(pods: Sequence[Process], read: Callable[[], Attempt], grace_s: float = 30.0) -> Attempt:
    """Let the pods of an attempt end as the operator does. ``read`` is :func:`read_outputs` of their output prefix, and
    is called while the other pods still run."""
    sentinels = [sentinel(pod) for pod in pods]
    first = wait(sentinels, 600)
    assert first, "no pod has ended"
    code = exit_code(pods[sentinels.index(first[0])])  # type: ignore[arg-type]
    attempt = read() if code == 0 else Attempt(RETRIED, "user", f"JobFailed: exit code {code}")
    for pod in pods:
        pod.terminate()
    deadline = time.monotonic() + grace_s
    for pod, ended in zip(pods, sentinels, strict=True):
        wait([ended], max(0.0, deadline - time.monotonic()))
        pod.kill()
        exit_code(pod)
    return attempt


def sentinel(pod: Process) -> int:
    return pod.sentinel if isinstance(pod, BaseProcess) else os.pidfd_open(pod.pid)


def exit_code(pod: Process) -> int:
    if isinstance(pod, BaseProcess):
        pod.join()
        assert pod.exitcode is not None
        return pod.exitcode
    return pod.wait()


def read_outputs(objects: dict[str, bytes], aggregated: bool = False) -> Attempt:
    """What propeller makes of the objects at the output prefix, by name."""
    names = [n for n in objects if n.startswith("error") and n.endswith(".pb")] if aggregated else ["error.pb"]
    errors = [ErrorDocument.FromString(objects[name]).error for name in names if name in objects]
    if errors:
        error = min(errors, key=lambda error: error.timestamp.ToNanoseconds())
        retried = error.kind == ContainerError.RECOVERABLE
        budget = "system" if error.origin == ExecutionError.SYSTEM else "user"
        return Attempt(RETRIED if retried else FAILED, budget if retried else "", error.message)
    if "outputs.pb" in objects:
        return Attempt(SUCCEEDED)
    return Attempt(RETRIED, "user", "OutputsNotFound")
