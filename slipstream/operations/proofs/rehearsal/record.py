"""Attempts, cache hits and spent retries of an execution, for the log and the page."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome, RetryBudget
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.shared.artifacts.results.ledger import AttemptRecord

MAPPED = re.compile(r"map_(\w+)_[0-9a-f]{32}-arraynode")


@dataclass
class TaskAttempt:
    """Attempt at a node: its pods, replaced pods included, and its end. Times are seconds since 1970."""

    node: str
    task: str
    number: int
    on_spot: bool
    started: float
    pods: list[PodProcess] = field(default_factory=list)
    ended: float = 0.0
    outcome: AttemptOutcome | None = None


@dataclass(frozen=True)
class AttemptSteps:
    """Steps of an attempt at a training: resumed from, left at, and lost, as the next attempt repeats them.

    None if the attempt ended before its first record.
    """

    number: int
    resumed: int | None = None
    left: int | None = None
    lost: int | None = None


def attempt_steps(attempts: Sequence[TaskAttempt], records: Sequence[AttemptRecord]) -> tuple[AttemptSteps, ...]:
    """Return the steps of a training's attempts by their records, which are those that began meanwhile."""
    ordered, rows = sorted(records, key=lambda record: record.began_at), list[AttemptSteps]()
    own = {
        attempt.number: next((r for r in ordered if attempt.started <= r.began_at <= (attempt.ended or math.inf)), None)
        for attempt in attempts
    }
    for number, record in own.items():
        if record is None:
            rows.append(AttemptSteps(number))
            continue
        later = next((its for other, its in own.items() if other > number and its), None)
        resumed = later.first_step if later else record.last_step
        # The record of a killed attempt is seconds old, but it got at least to where the next one resumed.
        left = max(record.last_step, resumed)
        rows.append(AttemptSteps(number, record.first_step, left, left - resumed))
    return tuple(rows)


def short(task: str) -> str:
    """Return a task's name without its module, also for a mapped task."""
    name = task.rpartition(".")[2]
    found = MAPPED.fullmatch(name)
    return found[1] if found else name


class ExecutionRecord:
    """Record of one execution."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.lock = say, threading.Lock()
        self.started, self.ended = time.time(), 0.0
        self.attempts: list[TaskAttempt] = []
        #: Tasks by node: nodes whose outputs came from the cache, and all nodes that are cached.
        self.hits: dict[str, str] = {}
        self.cached: dict[str, str] = {}
        self.budgets: dict[str, RetryBudget] = {}
        #: Steps of the attempts at the training; known after the end.
        self.steps: tuple[AttemptSteps, ...] = ()

    def line(self, node: str, task: str, what: str) -> None:
        self.say(f"{time.time() - self.started:7.1f} s  {node:<10} {short(task):<22} {what}")

    def looked_up(self, node: str, task: str, hit: bool) -> None:
        with self.lock:
            self.cached[node] = short(task)
            if hit:
                self.hits[node] = short(task)
                self.line(node, task, "cache hit")

    def begin(self, node: str, task: str, number: int, budget: RetryBudget, pods: int) -> TaskAttempt:
        attempt = TaskAttempt(node, short(task), number, budget.on_spot, time.time())
        with self.lock:
            self.attempts.append(attempt)
            self.budgets[node] = budget
            where = "spot" if budget.on_spot else "on demand"
            self.line(node, task, f"attempt {number}: {pods} pod{'s' if pods > 1 else ''}, {where}")
        return attempt

    def end(self, attempt: TaskAttempt, outcome: AttemptOutcome) -> None:
        attempt.ended, attempt.outcome = time.time(), outcome
        took = f"attempt {attempt.number}: {attempt.ended - attempt.started:.1f} s"
        with self.lock:
            if outcome.succeeded:
                self.line(attempt.node, attempt.task, f"{took}, succeeded")
            else:
                again = "" if outcome.recoverable else ", not recoverable"
                self.line(attempt.node, attempt.task, f"{took}, failed: {outcome.cause} ({outcome.payer}{again})")

    @property
    def spent(self) -> dict[str, int]:
        """Number of failures that each budget paid for, over all nodes."""
        return {
            "user": sum(budget.user for budget in self.budgets.values()),
            "system": sum(budget.system for budget in self.budgets.values()),
        }

    def summary(self) -> str:
        nodes, pods = {attempt.node for attempt in self.attempts}, sum(len(attempt.pods) for attempt in self.attempts)
        failed = [attempt for attempt in self.attempts if attempt.outcome and not attempt.outcome.succeeded]
        parts = [f"{len(nodes)} nodes ran in {len(self.attempts)} attempts with {pods} pods"]
        if failed:
            spent = ", ".join(f"{number} paid by the {payer}" for payer, number in self.spent.items())
            parts.append(f"{len(failed)} attempts failed: {spent}")
        parts.append(f"{len(self.hits)} of {len(self.cached)} cached nodes were hits")
        return "; ".join(parts)
