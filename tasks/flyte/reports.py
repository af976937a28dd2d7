"""What each worker of a pod leaves for its agent when it ends.

By itself the agent learns only of the first worker that torch saw failing. One failure brings about others, on other
ranks too, and which of them is seen first is chance; so the workers say how they ended, and the worst of it counts.
"""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

from slipstream.errors import Interrupted, Preempted, UserError


class Outcome(IntEnum):
    """How a worker ended, the worst first."""

    REFUSED = 0
    FAILED = 1
    PREEMPTED = 2
    INTERRUPTED = 3
    FINISHED = 4


@dataclass(frozen=True)
class Report:
    """How one worker ended, and why."""

    rank: int
    outcome: Outcome
    message: str = ""

    @classmethod
    def of(cls, error: Exception) -> Report:
        """The report of this worker, which raised ``error``."""
        rank = this_rank()
        if isinstance(error, UserError):
            return cls(rank, Outcome.REFUSED, error.message)
        if isinstance(error, Interrupted):
            outcome = Outcome.PREEMPTED if isinstance(error, Preempted) else Outcome.INTERRUPTED
            return cls(rank, outcome, str(error))
        return cls(rank, Outcome.FAILED, f"rank {rank} failed\n" + "".join(traceback.format_exception(error)))

    def leave(self, directory: str) -> None:
        """Write this worker's report beside ``directory``."""
        target = report_file(directory)
        part = target.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(target)


def this_rank() -> int:
    """0 in an agent that does the workers' part itself."""
    return int(os.environ.get("RANK", "0"))


def report_file(directory: str) -> Path:
    # By the local rank: a worker that is started again keeps it, its global rank may be another.
    return Path(f"{directory}.worker-{os.environ.get('LOCAL_RANK', '0')}.json")


def clear_report(directory: str) -> None:
    """Remove the report of the worker in whose place this one was started."""
    report_file(directory).unlink(missing_ok=True)


def collect_reports(directory: str) -> list[Report]:
    """Read the reports of a pod's workers, the worst first, and remove them."""
    where, reports = Path(directory), []
    for path in where.parent.glob(f"{where.name}.worker-*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        reports.append(Report(found["rank"], Outcome(found["outcome"]), found["message"]))
        path.unlink()
    return sorted(reports, key=lambda report: (report.outcome, report.rank))
