"""How a pod of a PyTorchJob leaves: not before there is a verdict, and with one verdict for all.

To the training operator (1.8, 1.9) a job with an elastic policy has succeeded as soon as any one of its pods exits
with 0, and failed as soon as one exits otherwise; either way it ends the pods that still run: SIGTERM, and SIGKILL
after the grace period. So a pod whose work is done waits until the pod of rank 0 has handed on the result, and a pod
that lost its peers gives the one that may know why the time to say so.

The verdict is what the pods, together, leave at the output prefix of the attempt, which all of them share. Flyte reads
it once the operator calls the job succeeded: an error before the outputs, and of the errors ``error.pb`` or, with its
distributed error aggregation switched on, the earliest of ``error*.pb``. flytekit's own way is that every pod
overwrites ``error.pb``, or adds one. Then a neighbour's "peer lost" competes with the "out of memory" that brought it
about, and whether the attempt is repeated is chance. Here there is one ``error.pb`` under either setting: a consequence
is put only where there is nothing, which the store decides atomically, and a cause replaces a consequence.
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

from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.storage import AlreadyThere, MissingObject, StorageUnavailable, open_reader, storage_for
from tasks.flyte.failures import PodPreempted, SmallerMicroBatches

ERROR, OUTPUTS = "error.pb", "outputs.pb"


class Verdict(Enum):
    """What lies at the prefix."""

    NONE = "nothing yet"
    SUCCESS = "outputs"
    CONSEQUENCE = "an error that Flyte retries"
    CAUSE = "an error that Flyte does not retry"


@dataclass(frozen=True)
class OutputPrefix:
    """The output prefix of one attempt, a path or URI. Methods raise ``UserError`` and ``StorageUnavailable``."""

    uri: str

    def look(self) -> Verdict:
        """The verdict so far: errors count before outputs, and causes before consequences, whoever wrote them."""
        keys = storage_for(self.uri).list()
        errors = [key for key in keys if key.startswith("error") and key.endswith(".pb")]
        kinds = {self._kind(key) for key in errors}
        if ContainerError.NON_RECOVERABLE in kinds:
            return Verdict.CAUSE
        if kinds:
            return Verdict.CONSEQUENCE
        return Verdict.SUCCESS if OUTPUTS in keys else Verdict.NONE

    def leave(self, error: Exception) -> None:
        """Make ``error`` the verdict, unless there is one that counts more."""
        document = error_document(error)
        data, storage = document.SerializeToString(), storage_for(self.uri)
        try:
            # A job that ends because its store ignores conditional writes must still report that.
            storage.create(ERROR, data, exactly_one=False)
        except AlreadyThere:
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
    """The document in which flytekit would record that a task function raised ``error``."""
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
#: How long a finished pod waits for the result of rank 0's. A result is uploaded in minutes, and the task's time-out
#: ends the job in any case; if the hour passes, rank 0's pod hangs, and another attempt is made.
RESULT_S = 3600.0
#: How long a pod that lost its peers looks for the cause. The agent of the pod that has it notices within a second and
#: then gives its other workers 30 seconds to end before it kills them.
CAUSE_S = 45.0
#: For how long a verdict is put again when the store stays away.
STORE_S = 900.0


@contextmanager
def one_verdict(prefix: OutputPrefix) -> Iterator[None]:
    """Run a pod's part of the job in the block. What it raises becomes ``IgnoreOutputs``, with which the pod exits with
    0 and writes nothing more, as soon as the verdict of the job lies at ``prefix``."""
    if prefix.look() is not Verdict.NONE:
        raise IgnoreOutputs("this attempt is over: the operator started a pod for one that was deleted")
    try:
        yield
    except IgnoreOutputs:
        if wait_for(prefix, RESULT_S, lambda found: found is not Verdict.NONE) is Verdict.NONE:
            LOG.warning("no result and no error at %s after %.0f s: leaving without", prefix.uri, RESULT_S)
        raise
    except Exception as error:
        LOG.error("%s: %s", type(error).__name__, error)
        blind = not is_cause(error) and not isinstance(error, (PodPreempted, SmallerMicroBatches))
        found = wait_for(prefix, CAUSE_S if blind else 0.0, lambda found: found in (Verdict.CAUSE, Verdict.SUCCESS))
        # Flyte would prefer an error to a result that is complete.
        if found is not Verdict.SUCCESS and not persistently(partial(prefix.leave, error), STORE_S):
            raise
        raise IgnoreOutputs(f"the verdict of this job lies at {prefix.uri}") from error


def wait_for(prefix: OutputPrefix, seconds: float, enough: Callable[[Verdict], bool]) -> Verdict:
    """Look at the prefix until it holds ``enough``; returns what was found last. A store that does not answer, or
    refuses to, is no answer."""
    deadline, found = time.monotonic() + seconds, Verdict.NONE
    while True:
        try:
            found = prefix.look()
        except (StorageUnavailable, UserError) as error:
            LOG.warning("cannot tell whether the job has ended: %s", error)
        if enough(found) or time.monotonic() >= deadline:
            return found
        time.sleep(POLL_S)


def persistently(put: Callable[[], object], seconds: float) -> bool:
    """Call ``put`` until the store has taken it; whether it did so in this time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            put()
        except (StorageUnavailable, UserError) as error:
            LOG.warning("cannot record how the job ended: %s", error)
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


def outlive_sigterm() -> None:
    """Let SIGTERM pass unheeded from here on: what is left to do, uploading the result or the verdict, is done within
    the grace period or not at all. Replaces torch's handler, which outlives the process group and raises."""
    if threading.current_thread() is threading.main_thread():
        # Ignored, not handled by a function: Python takes its handlers away before the process ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
