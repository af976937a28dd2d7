"""Pods of a job without torch's agent: their workers end as given, by the code of a real pod."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs

from slipstream.flyte import departure
from slipstream.flyte.departure import OUTPUTS, JobResult, OutputPrefix, one_verdict, outlive_sigterm
from slipstream.flyte.elastic import Workspace
from slipstream.flyte.failures import agent_error, collect_reports
from slipstream.operations.proofs.rehearsal.operator import watch_job
from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import OutOfMemory, Preempted
from slipstream.shared.storage import storage_for

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
SMALLER = OutOfMemory("rank 3 ran out of memory at 1 micro-batch: goes on with 2 from the last checkpoint")
LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2713")
PREEMPTED = Preempted("stopped at step 40, saved (aws: spot terminate)")


@dataclass(frozen=True)
class Play:
    """What one pod does: its workers, by (global rank, error), end in this order; the pod then needs ``agent_s``.

    They start after ``seconds``, and with ``after_result`` not before the job's result is recorded.
    """

    workers: list[tuple[int, Exception | None]]
    seconds: float
    agent_s: float = 0.0
    after_result: bool = False


def pod(uri: str, environment: dict[str, str], directory: Path, play: Play) -> None:
    """The process of a pod. Like ``pyflyte-execute`` it exits with 0 once it has written what there is to write."""
    os.setsid()
    os.environ.update(environment)
    departure.POLL_S, departure.CAUSE_S = 0.02, 3.0
    prefix = OutputPrefix(uri)
    with suppress(IgnoreOutputs), one_verdict(prefix):
        time.sleep(play.seconds)
        if play.after_result:
            departure.wait_for(prefix, 60, lambda found: found is JobResult.SUCCESS)
        first: Exception | None = None
        for local, (rank, error) in enumerate(play.workers):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local)}
            workspace = Workspace("train", str(directory), "none", "", Holder())
            try:
                workspace.work(partial(fail, error))
            except Exception as raised:
                first = first or raised
        outlive_sigterm()
        time.sleep(play.agent_s)
        reports = collect_reports(str(directory))
        if first is None and 0 in [rank for rank, _ in play.workers]:
            storage_for(uri).put(OUTPUTS, b"")
            return
        if first is None:
            raise IgnoreOutputs("rank 0's pod returns the result")
        ended = first if isinstance(first, FlyteRecoverableException) else FlyteUserRuntimeException(first)
        raise agent_error(ended, reports)


def fail(error: Exception | None) -> None:
    if error:
        raise error


def run_job(pods: list[PodProcess], read: Callable[[], AttemptOutcome]) -> AttemptOutcome:
    """The verdict on a job by our own clean policy, once all its pods have ended. ``read`` is what propeller makes of
    its outputs; it is called while the other pods may still run."""
    verdict = watch_job(pods, never, "CLEANPOD_POLICY_RUNNING", threading.Event()) or read()
    for pod in pods:
        pod.finish()
    return verdict


def never(index: int) -> PodProcess:
    raise AssertionError(f"pod {index} was not to be made again")
