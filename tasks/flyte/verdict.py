"""The verdict of a job: what its pods, together, leave at the output prefix of the attempt.

All pods of a PyTorchJob share one prefix. Flyte reads it once the operator calls the job succeeded, which it does when
the first pod exits with 0: an error before the outputs, and of the errors ``error.pb`` or, with its distributed error
aggregation switched on, the earliest of ``error*.pb``. flytekit's own way is that every pod overwrites ``error.pb``, or
adds one. Then a neighbour's "peer lost" competes with the "out of memory" that brought it about, and whether the
attempt is repeated is chance. Here there is one ``error.pb`` under either setting: a consequence is put only where
there is nothing, which the store decides atomically, and a cause replaces a consequence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

from slipstream.storage import AlreadyThere, MissingObject, open_reader, storage_for

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
            storage.put(ERROR, data, fresh=True)
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
