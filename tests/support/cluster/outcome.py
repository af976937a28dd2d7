"""The outcome of an attempt from the files at its output prefix (``task/handler.go: ValidateOutput``)."""

from __future__ import annotations

from itertools import pairwise

from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from flyteidl.core.literals_pb2 import Literal, LiteralMap

from tests.support.cluster.bucket import Bucket
from tests.support.cluster.budgets import Verdict


def read_outcome(bucket: Bucket, prefix: str, aggregated: bool = False) -> tuple[Verdict, dict[str, Literal]]:
    """An error comes before outputs. Neither is worth another attempt, for which the user pays.

    ``aggregated``: with Flyte's distributed error aggregation the earliest of ``error*.pb`` counts
    (``ioutils/remote_file_output_reader.go``).
    """
    keys = [key for key in bucket.keys(f"{prefix}/error") if key.endswith(".pb")] if aggregated else []
    found = [bucket.message(key, ErrorDocument) for key in keys or [f"{prefix}/error.pb"]]
    errors = [document.error for document in found if document is not None]
    if errors:
        error = min(errors, key=lambda each: each.timestamp.ToNanoseconds())
        payer = "system" if error.origin == ExecutionError.SYSTEM else "user"
        return Verdict(payer, cause_of(error.message) or error.code, error.kind == ContainerError.RECOVERABLE), {}  # type: ignore[arg-type]
    outputs = bucket.message(f"{prefix}/outputs.pb", LiteralMap)
    if outputs is None:
        return Verdict("user", "OutputsNotFound"), {}
    return Verdict("", ""), dict(outputs.literals)


def cause_of(message: str) -> str:
    """The line of flytekit's message that says what happened, among the frames."""
    lines = [line.strip() for line in message.splitlines() if line.strip(" =")]
    said = [after for before, after in pairwise(lines) if before == "Message:"] or lines
    return said[-1].rpartition("error=")[2].removesuffix(", cause=")[:200] if said else ""
