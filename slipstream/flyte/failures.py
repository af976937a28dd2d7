"""Classification of failures for Flyte: retry, or report to the user.

A failure is recoverable if another attempt can help: the machine was preempted, a signal killed a worker, a peer was
lost, a store was unavailable, or a step ran out of memory and micro-batches can be smaller. A user's mistake, a
non-finite loss, other lack of memory and bugs are not recoverable: a retry would fail again. An unrecoverable failure
is the *cause*; a recoverable one may be its *consequence*. torch elastic tells the agent only of the first failure,
which may be either. So every worker reports its end, and the agent uses the worst.
"""

from __future__ import annotations

import logging
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

from slipstream.shared.artifacts.records import decode_record, to_json
from slipstream.shared.distributed.user_errors import ErrorMeaning, error_meaning, torch_user_error
from slipstream.shared.errors import Interrupted, OutOfMemory, Preempted, UserError
from slipstream.shared.storage import StorageUnavailable

#: Loggers of torch's elastic agent and of the processes that it starts.
AGENT_LOGS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")


class WorkerExit(IntEnum):
    """How a worker ended, worst first."""

    REFUSED = 0
    FAILED = 1
    OUT_OF_MEMORY = 2
    PREEMPTED = 3
    INTERRUPTED = 4
    FINISHED = 5


#: How a worker ended that raised an error of a type; the first match counts.
WORKER_EXITS: tuple[tuple[type[Exception], WorkerExit], ...] = (
    (UserError, WorkerExit.REFUSED),
    (OutOfMemory, WorkerExit.OUT_OF_MEMORY),
    (Preempted, WorkerExit.PREEMPTED),
    (Interrupted, WorkerExit.INTERRUPTED),
    (Exception, WorkerExit.FAILED),
)


@dataclass(frozen=True)
class FailureReport:
    """Record of how and why one worker ended, written for the agent."""

    rank: int
    outcome: WorkerExit
    message: str = ""
    #: Number of micro-batches per step when a step ran out of memory, else 0.
    micro_batches: int = 0

    @classmethod
    def of(cls, error: Exception) -> FailureReport:
        rank, outcome = this_rank(), next(outcome for kind, outcome in WORKER_EXITS if isinstance(error, kind))
        if outcome is WorkerExit.FAILED:
            return cls(rank, outcome, f"rank {rank} failed\n" + "".join(traceback.format_exception(error)))
        message = error.message if isinstance(error, UserError) else str(error)
        return cls(rank, outcome, message, error.micro_batches if isinstance(error, OutOfMemory) else 0)

    def leave(self, directory: str) -> None:
        """Write this worker's report to a file next to ``directory``."""
        target = report_file(directory)
        part = target.with_suffix(".part")
        # A traceback may have file names that are not valid UTF-8.
        report = replace(self, message=self.message.encode(errors="backslashreplace").decode())
        try:
            part.write_bytes(to_json(report))
            part.replace(target)
        except OSError:
            # A full disk has no space for a report; torch still passes on the worker's error.
            part.unlink(missing_ok=True)


def this_rank() -> int:
    """Return the global rank; 0 in an agent that runs the task function itself."""
    return int(os.environ.get("RANK", "0"))


def report_file(directory: str) -> Path:
    # A restarted worker keeps its local rank, but may get another global rank.
    return Path(f"{directory}.worker-{os.environ.get('LOCAL_RANK', '0')}.json")


def clear_report(directory: str) -> None:
    """Remove the report of an earlier worker with this local rank."""
    report_file(directory).unlink(missing_ok=True)


def read_reports(directory: str) -> list[FailureReport]:
    """Return the reports of this pod's workers, worst first, without damaged ones."""
    reports = []
    for path in report_files(directory):
        if report := decode_record(path.read_bytes(), FailureReport):
            reports.append(report)
    return sorted(reports, key=lambda report: (report.outcome, report.rank))


def collect_reports(directory: str) -> list[FailureReport]:
    """Return :func:`read_reports` and delete the files."""
    reports = read_reports(directory)
    for path in report_files(directory):
        path.unlink()
    return reports


def report_files(directory: str) -> list[Path]:
    where = Path(directory)
    return list(where.parent.glob(f"{where.name}.worker-*.json"))


#: Errors of an agent that cannot reach the agents of other pods, which may have ended or not have started.
LOST_AGENT = (RendezvousError, DistError)
#: Errors of the agent when a process group ends without a result of its rank 0.
GROUP_ENDED = (FlyteRecoverableException, FlyteUserRuntimeException, IgnoreOutputs, SignalException, *LOST_AGENT)


class PodPreempted(FlyteRecoverableException):
    """Preemption with a notice of any pod of this job; a cause, not a consequence."""


class SmallerMicroBatches(FlyteRecoverableException):
    """Out of memory in a step; the next attempt uses smaller micro-batches. A cause, not a consequence."""


class WorkerFailed(RuntimeError):
    """Bug or non-finite number in a worker, with the worker's traceback."""


class GroupEnd(IntEnum):
    """Error that torch or the plugin raised in the agent when its workers ended."""

    SIGNAL = 0
    RECOVERABLE = 1
    LOST = 2
    OTHER = 3

    @classmethod
    def of(cls, error: Exception) -> GroupEnd:
        if told_to_end(error):
            return cls.SIGNAL
        if isinstance(error, FlyteRecoverableException):
            return cls.RECOVERABLE
        return cls.LOST if lost_peer(error) else cls.OTHER


#: Type of the error that the agent raises, by the worst report of its workers (None without reports) and the end of the
#: group, in the order of :class:`GroupEnd`. None: the error of the group. After a signal, which the workers got too,
#: all reports but a refusal may be consequences.
AGENT_ERRORS: dict[WorkerExit | None, tuple[type[Exception] | None, ...]] = {
    WorkerExit.REFUSED: (UserError, UserError, UserError, UserError),
    WorkerExit.FAILED: (PodPreempted, WorkerFailed, WorkerFailed, None),
    WorkerExit.OUT_OF_MEMORY: (PodPreempted, SmallerMicroBatches, SmallerMicroBatches, SmallerMicroBatches),
    WorkerExit.PREEMPTED: (PodPreempted, PodPreempted, PodPreempted, None),
    WorkerExit.INTERRUPTED: (PodPreempted, FlyteRecoverableException, FlyteRecoverableException, None),
    WorkerExit.FINISHED: (PodPreempted, FlyteRecoverableException, FlyteRecoverableException, None),
    None: (PodPreempted, FlyteRecoverableException, FlyteRecoverableException, None),
}


def agent_error(error: Exception, reports: list[FailureReport]) -> Exception:
    """Return the error that the agent raises (:data:`AGENT_ERRORS`).

    ``error`` is what torch or the plugin raised when the group ended; ``reports`` are sorted, worst first.
    """
    end, worst = GroupEnd.of(error), reports[0] if reports else None
    kind = AGENT_ERRORS[worst.outcome if worst else None][end]
    if kind is None:
        return error
    if kind is FlyteRecoverableException:
        # torch's message lists every worker's traceback.
        reported = worst.message if worst and end is GroupEnd.RECOVERABLE else ""
        return kind(reported or lost_peer(error) or str(error))
    if kind is PodPreempted and end is GroupEnd.SIGNAL:
        saved = next((report.message for report in reports if report.outcome is WorkerExit.PREEMPTED), "")
        return kind(saved or f"the agent was told to end: {told_to_end(error)}")
    return kind(worst.message if worst else "")


def ran_out_of_memory(error: Exception, reports: list[FailureReport]) -> bool:
    """Return True if a step ran out of memory and smaller micro-batches are possible."""
    return isinstance(agent_error(error, reports), SmallerMicroBatches)


def lost_peer(error: Exception) -> str:
    """Return which agent or worker the group lost, else ""."""
    return f"another pod's agent was lost: {error}" if isinstance(error, LOST_AGENT) else lost_worker(error)


def told_to_end(error: Exception) -> SignalException | None:
    """Return the signal that ended the agent, or None.

    The plugin converts a ``SignalException`` to ``IgnoreOutputs``, for which the pod exits with 0 and without outputs,
    so a PyTorchJob would count as succeeded.
    """
    signalled = error.__context__ if isinstance(error, IgnoreOutputs) else error
    return signalled if isinstance(signalled, SignalException) else None


def quiet_ctrl_c() -> None:
    """Drop torch's lines on Ctrl-C: the line of this project says what it means."""
    ctrl_c = (signal.SIGINT, signal.SIGINT.name)
    for name in AGENT_LOGS:
        logging.getLogger(name).addFilter(lambda record: not any(each in (record.args or ()) for each in ctrl_c))


def lost_worker(error: Exception) -> str:
    """Return a message if the first failing worker was killed by a signal, else ""."""
    failed = error.__context__
    if not isinstance(failed, ChildFailedError):
        return ""
    rank, failure = failed.get_first_failure()
    name = lost_to_signal(failure.exitcode)
    return f"the worker of rank {rank} was lost to {name}" if name else ""


def as_seen_by_flyte(error: Exception) -> Exception:
    """Return the error that a worker raises instead of ``error``.

    It is an ``Interrupted`` if another attempt can help, a ``UserError`` if a setting can help, otherwise ``error``.
    """
    if mendable := torch_user_error(error):
        return mendable
    if isinstance(error, StorageUnavailable) or error_meaning(error) in (ErrorMeaning.BROKEN, ErrorMeaning.PEER):
        return Interrupted(f"{type(error).__name__}: {error}")
    return error


def lost_to_signal(exit_code: int) -> str:
    """Return the name of the signal that killed a worker with this exit code, else ""."""
    try:
        return signal.Signals(-exit_code).name if exit_code < 0 else ""
    except ValueError:
        return f"signal {-exit_code}"
