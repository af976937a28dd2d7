"""What a failure means to Flyte: try again, or tell the user.

Recoverable is what another attempt can help: the machine was taken away, a worker was lost to a signal, a peer was
lost, a store stayed away, a step took too much memory and can have smaller micro-batches. A user's mistake, a
non-finite loss, too little memory otherwise and bugs are not: retried they would only cost the same again. Where one
failure brings about others, what is not recoverable is the *cause*, and what is recoverable may be its *consequence*.
By itself the agent learns only of the first worker that torch saw failing, which is chance; so each worker leaves a
report of how it ended, and the worst of them counts.
"""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from slipstream.artifacts.records import decode_record, to_json
from slipstream.distributed.error_meanings import Meaning, meaning_of
from slipstream.distributed.user_errors import explained
from slipstream.errors import Interrupted, OutOfMemory, Preempted, UserError
from slipstream.storage import StorageUnavailable


class Outcome(IntEnum):
    """How a worker ended, the worst first."""

    REFUSED = 0
    FAILED = 1
    OUT_OF_MEMORY = 2
    PREEMPTED = 3
    INTERRUPTED = 4
    FINISHED = 5


@dataclass(frozen=True)
class Report:
    """How one worker ended, and why."""

    rank: int
    outcome: Outcome
    message: str = ""
    #: With how many it ran out of memory, if it did in a step.
    micro_batches: int = 0

    @classmethod
    def of(cls, error: Exception) -> Report:
        """The report of this worker, which raised ``error``."""
        rank = this_rank()
        if isinstance(error, UserError):
            return cls(rank, Outcome.REFUSED, error.message)
        if isinstance(error, Interrupted):
            kinds = {OutOfMemory: Outcome.OUT_OF_MEMORY, Preempted: Outcome.PREEMPTED}
            known = (outcome for kind, outcome in kinds.items() if isinstance(error, kind))
            ran_out = error.micro_batches if isinstance(error, OutOfMemory) else 0
            return cls(rank, next(known, Outcome.INTERRUPTED), str(error), ran_out)
        return cls(rank, Outcome.FAILED, f"rank {rank} failed\n" + "".join(traceback.format_exception(error)))

    def leave(self, directory: str) -> None:
        """Write this worker's report beside ``directory``."""
        target = report_file(directory)
        part = target.with_suffix(".part")
        # A traceback may name files whose names are no text.
        report = replace(self, message=self.message.encode(errors="backslashreplace").decode())
        try:
            part.write_bytes(to_json(report))
            part.replace(target)
        except OSError:
            # Where the disk is full there is no room for a report either; torch hands on what the worker raises.
            part.unlink(missing_ok=True)


def this_rank() -> int:
    """0 in an agent that does the workers' part itself."""
    return int(os.environ.get("RANK", "0"))


def report_file(directory: str) -> Path:
    # By the local rank: a worker that is started again keeps it, its global rank may be another.
    return Path(f"{directory}.worker-{os.environ.get('LOCAL_RANK', '0')}.json")


def clear_report(directory: str) -> None:
    """Remove the report of the worker in whose place this one was started."""
    report_file(directory).unlink(missing_ok=True)


def ran_out_of_memory(error: Exception, reports: list[Report]) -> bool:
    """Whether the group ended for want of memory in a step, and smaller micro-batches are to be tried."""
    return bool(reports) and reports[0].outcome is Outcome.OUT_OF_MEMORY and not told_to_end(error)


def read_reports(directory: str) -> list[Report]:
    """The reports of a pod's workers, the worst first. Damaged ones are skipped."""
    reports = []
    for path in report_files(directory):
        if report := decode_record(path.read_bytes(), Report):
            reports.append(report)
    return sorted(reports, key=lambda report: (report.outcome, report.rank))


def collect_reports(directory: str) -> list[Report]:
    """:func:`read_reports`, and remove them."""
    reports = read_reports(directory)
    for path in report_files(directory):
        path.unlink()
    return reports


def report_files(directory: str) -> list[Path]:
    where = Path(directory)
    return list(where.parent.glob(f"{where.name}.worker-*.json"))


#: What an agent raises when it cannot reach the others: their pod may have gone, or not have come.
LOST_AGENT = (RendezvousError, DistError)
#: What a process group's end looks like to its agent, unless its rank 0 returned a result.
GROUP_ENDED = (FlyteRecoverableException, FlyteUserRuntimeException, IgnoreOutputs, SignalException, *LOST_AGENT)


class PodPreempted(FlyteRecoverableException):
    """This pod, or another of its job, is being taken away and said so: there is no other cause to look for."""


class SmallerMicroBatches(FlyteRecoverableException):
    """A rank ran out of memory and left word of how the next attempt does with less: there is no other cause."""


class WorkerFailed(RuntimeError):
    """A worker's bug or impossible number, in the words of its own traceback."""


def failure_of(error: Exception, reports: list[Report]) -> Exception:
    """What the agent raises: ``error`` is how torch or the plugin put the group's end, ``reports`` are sorted."""
    worst = reports[0] if reports else None
    if worst and worst.outcome is Outcome.REFUSED:
        return UserError(worst.message)
    if signalled := told_to_end(error):
        # The workers were told as well: what else they report may have come of that.
        saved = next((report.message for report in reports if report.outcome is Outcome.PREEMPTED), "")
        return PodPreempted(saved or f"the agent was told to end: {signalled}")
    if worst and worst.outcome is Outcome.OUT_OF_MEMORY:
        return SmallerMicroBatches(worst.message)
    why = interruption(error)
    if not why:
        return error
    if worst and worst.outcome is Outcome.FAILED:
        return WorkerFailed(worst.message)
    if worst and worst.outcome is Outcome.PREEMPTED:
        return PodPreempted(worst.message)
    if worst and worst.message and isinstance(error, FlyteRecoverableException):
        why = worst.message  # torch's lists every worker's traceback
    return FlyteRecoverableException(why)


def interruption(error: Exception) -> str:
    """Why the workers were interrupted, in which case another attempt can help; empty if they failed otherwise."""
    if isinstance(error, LOST_AGENT):
        return f"another pod's agent was lost: {error}"
    return lost_worker(error) or (str(error) if isinstance(error, FlyteRecoverableException) else "")


def told_to_end(error: Exception) -> SignalException | None:
    """The signal that ended the agent. The plugin turns it into ``IgnoreOutputs``, with which the pod would exit 0
    without outputs; that looks like success to a PyTorchJob."""
    signalled = error.__context__ if isinstance(error, IgnoreOutputs) else error
    return signalled if isinstance(signalled, SignalException) else None


def lost_worker(error: Exception) -> str:
    """The message if a signal ended the first worker that failed; empty if it failed otherwise."""
    failed = error.__context__
    if not isinstance(failed, ChildFailedError):
        return ""
    rank, failure = failed.get_first_failure()
    name = lost_to_signal(failure.exitcode)
    return f"the worker of rank {rank} was lost to {name}" if name else ""


def as_seen_by_flyte(error: Exception) -> Exception:
    """The error that a worker raises instead of ``error``: an ``Interrupted`` if another attempt can help, a
    ``UserError`` if a setting can, else the same."""
    if mendable := explained(error):
        return mendable
    if isinstance(error, StorageUnavailable) or meaning_of(error) in (Meaning.BROKEN, Meaning.PEER):
        return Interrupted(f"{type(error).__name__}: {error}")
    return error


def lost_to_signal(exit_code: int) -> str:
    """The name of the signal that ended a worker; empty if it ended otherwise."""
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else ""
    except ValueError:
        return f"signal {-exit_code}"
