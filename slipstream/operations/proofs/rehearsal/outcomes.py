"""Outcome of an attempt from its files, and the retry budgets that pay for the next attempt."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal as OneOf

from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from flyteidl.core.literals_pb2 import Literal, LiteralMap

from slipstream.operations.proofs.rehearsal.bucket import S3Bucket

#: propeller's ``max-node-retries-system-failures``. The failure after these ends the node.
SYSTEM_RETRIES = 3

Payer = OneOf["", "user", "system"]


@dataclass(frozen=True)
class AttemptOutcome:
    """Outcome of an attempt. ``payer`` is the retry budget that a failure is charged to; empty after a success."""

    payer: Payer
    cause: str
    recoverable: bool = True

    @property
    def succeeded(self) -> bool:
        return not self.payer


@dataclass
class RetryBudget:
    """Retries that a node has spent (``executor.go: isEligibleForRetry``).

    ``retries`` is the user's budget.
    """

    retries: int
    interruptible: bool
    user: int = 0
    system: int = 0

    @property
    def on_spot(self) -> bool:
        """True if the next attempt runs on spot nodes: the last attempt that the system pays for does not."""
        return self.interruptible and self.system < SYSTEM_RETRIES

    def spend(self, outcome: AttemptOutcome) -> bool:
        """Count a failed attempt. Return True if another attempt follows."""
        if outcome.payer == "system":
            self.system += 1
            left = self.system <= SYSTEM_RETRIES
        else:
            self.user += 1
            left = self.user <= self.retries
        return left and outcome.recoverable


def read_outcome(bucket: S3Bucket, prefix: str, aggregated: bool = False) -> tuple[AttemptOutcome, dict[str, Literal]]:
    """Return the outcome of an attempt and its outputs, from the files at its output prefix.

    An error counts before outputs (``task/handler.go: ValidateOutput``). The user pays for an error and for missing
    outputs. ``aggregated``: the earliest of ``error*.pb`` counts
    (``ioutils/remote_file_output_reader.go``).
    """
    keys = [key for key in bucket.keys(f"{prefix}/error") if key.endswith(".pb")] if aggregated else []
    found = [bucket.message(key, ErrorDocument) for key in keys or [f"{prefix}/error.pb"]]
    errors = [document.error for document in found if document is not None]
    if errors:
        error = min(errors, key=lambda each: each.timestamp.ToNanoseconds())
        payer: Payer = "system" if error.origin == ExecutionError.SYSTEM else "user"
        recoverable = error.kind == ContainerError.RECOVERABLE
        return AttemptOutcome(payer, cause_of(error.message) or error.code, recoverable), {}
    outputs = bucket.message(f"{prefix}/outputs.pb", LiteralMap)
    if outputs is None:
        return AttemptOutcome("user", "OutputsNotFound"), {}
    return AttemptOutcome("", ""), dict(outputs.literals)


def cause_of(message: str) -> str:
    """Return the line of flytekit's message that names the cause, found between the stack frames."""
    lines = [line.strip() for line in message.splitlines() if line.strip(" =")]
    said = [after for before, after in pairwise(lines) if before == "Message:"] or lines
    return said[-1].partition(", cause=")[0].rpartition("error=")[2][:200] if said else ""
