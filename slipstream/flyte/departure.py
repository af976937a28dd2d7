"""Coordinated shutdown of the pods of a PyTorchJob, with one recorded result for the job.

For the training operator (1.8, 1.9), a job with an elastic policy succeeds as soon as any pod exits with 0, and fails
as soon as any exits otherwise. In both cases it then ends the running pods: SIGTERM, and SIGKILL after the grace
period. So a finished pod waits until rank 0 has uploaded the result. A pod that lost its peers waits for a peer that
may record the cause.

All pods share the attempt's output prefix, where Flyte reads the result. Flyte prefers an error to outputs:
``error.pb`` or, with distributed error aggregation, the earliest ``error*.pb``.

With flytekit alone, every pod overwrites ``error.pb`` or adds a file. Here only one ``error.pb`` is written,
with or without aggregation. A pod writes a consequence ("peer lost") only if no error exists yet, by a conditional
write. A cause ("out of memory") replaces a consequence.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs

from slipstream.flyte.failures import PodPreempted, SmallerMicroBatches
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import MissingObject, StorageUnavailable, open_reader, storage_for, try_create

ERROR, OUTPUTS = "error.pb", "outputs.pb"


class JobResult(Enum):
    """Result of the job that is recorded at the output prefix."""

    NONE = "nothing yet"
    SUCCESS = "outputs"
    CONSEQUENCE = "an error that Flyte retries"
    CAUSE = "an error that Flyte does not retry"


@dataclass(frozen=True)
class OutputPrefix:
    """Output prefix (path or URI) of one attempt. Methods raise ``UserError`` and ``StorageUnavailable``."""

    uri: str

    def look(self) -> JobResult:
        """Return the recorded result of any pod; a cause precedes a consequence, and both precede outputs."""
        keys = storage_for(self.uri).list()
        errors = [key for key in keys if key.startswith("error") and key.endswith(".pb")]
        kinds = {self._kind(key) for key in errors}
        if ContainerError.NON_RECOVERABLE in kinds:
            return JobResult.CAUSE
        if kinds:
            return JobResult.CONSEQUENCE
        return JobResult.SUCCESS if OUTPUTS in keys else JobResult.NONE

    def leave(self, error: Exception) -> None:
        """Record ``error`` as the job's result.

        An earlier error stays, unless it is a consequence and ``error`` a cause.
        """
        document = error_document(error)
        data, storage = document.SerializeToString(), storage_for(self.uri)
        # A job that fails because its store ignores conditional writes must still report that.
        if try_create(storage, ERROR, data, exactly_one=False):
            return
        if is_cause(error) and self._kind(ERROR) is not ContainerError.NON_RECOVERABLE:
            storage.put(ERROR, data)

    def _kind(self, key: str) -> int | None:
        try:
            with open_reader(f"{self.uri.rstrip('/')}/{key}") as file:
                return ErrorDocument.FromString(file.read()).error.kind
        except MissingObject:
            return None


def is_cause(error: Exception) -> bool:
    return not isinstance(error, FlyteRecoverableException)


def error_document(error: Exception) -> ErrorDocument:
    """Return the ``error.pb`` that flytekit would write for a task function that raised ``error``."""
    from flytekit.bin.entrypoint import get_one_of, get_traceback_str

    wrapped = FlyteUserRuntimeException(error)
    wrapped.__cause__ = error
    document = ErrorDocument(
        error=ContainerError(
            code=wrapped.error_code,
            message=get_traceback_str(wrapped),
            kind=ContainerError.NON_RECOVERABLE if is_cause(error) else ContainerError.RECOVERABLE,
            origin=ExecutionError.USER,
            worker=get_one_of("FLYTE_INTERNAL_WORKER_NAME", "_F_WN"),
        )
    )
    document.error.timestamp.FromNanoseconds(time.time_ns())
    return document


LOG = logger("flyte")

POLL_S = 1.0
#: Timeout in seconds of a finished pod for the result of rank 0's pod. An upload takes minutes, and the task's timeout
#: ends the job in any case. If there is no result after an hour, rank 0's pod hangs; Flyte then starts another attempt.
RESULT_S = 3600.0
#: Timeout in seconds of a pod that lost its peers for the cause. The agent of the failed pod notices within a second,
#: then gives its other workers 30 seconds before it kills them.
CAUSE_S = 45.0
#: Timeout in seconds for recording the result in an unavailable store.
STORE_S = 900.0


@contextmanager
def one_verdict(prefix: OutputPrefix) -> Iterator[None]:
    """Run this pod's part of the job in the block; record an error as the job's result.

    Once a result is recorded at ``prefix``, an error of the block is replaced by ``IgnoreOutputs``, for which flytekit
    exits with 0 and writes nothing.
    """
    if prefix.look() is not JobResult.NONE:
        raise IgnoreOutputs("this attempt has ended; the operator replaced one of its deleted pods")
    try:
        yield
    except IgnoreOutputs:
        if wait_for(prefix, RESULT_S, lambda found: found is not JobResult.NONE) is JobResult.NONE:
            LOG.warning("rank 0's pod left no outcome at %s within %.0f s; this pod ends", prefix.uri, RESULT_S)
        raise
    except Exception as error:
        LOG.error("%s: %s", type(error).__name__, error)
        blind = not is_cause(error) and not isinstance(error, (PodPreempted, SmallerMicroBatches))
        found = wait_for(prefix, CAUSE_S if blind else 0.0, lambda found: found in (JobResult.CAUSE, JobResult.SUCCESS))
        # Flyte would prefer an error to a result that is complete.
        if found is not JobResult.SUCCESS and not retry_until_done(partial(prefix.leave, error), STORE_S):
            raise
        raise IgnoreOutputs(f"the outcome of this job is recorded at {prefix.uri}") from error


def wait_for(prefix: OutputPrefix, seconds: float, enough: Callable[[JobResult], bool]) -> JobResult:
    """Poll the prefix for ``seconds`` or until ``enough`` accepts its result; return the last result.

    Errors of the store are logged and do not end the wait.
    """
    deadline, found = time.monotonic() + seconds, JobResult.NONE
    while True:
        try:
            found = prefix.look()
        except (StorageUnavailable, UserError) as error:
            LOG.warning("the outcome of the job could not be read (%s)", error)
        if enough(found) or time.monotonic() >= deadline:
            return found
        time.sleep(POLL_S)


def retry_until_done(put: Callable[[], object], seconds: float) -> bool:
    """Call ``put`` until it succeeds; return False if it did not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            put()
        except (StorageUnavailable, UserError) as error:
            LOG.warning("the outcome of the job could not be recorded (%s)", error)
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


def outlive_sigterm() -> None:
    """Ignore SIGTERM from now on.

    The result's upload ends within the grace period or is lost. This replaces torch elastic's handler, which raises
    even after the process group has ended.
    """
    if threading.current_thread() is threading.main_thread():
        # SIG_IGN, as Python removes handler functions before the process ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
