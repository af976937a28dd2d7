"""Events of a rehearsal, logged as they happen and kept for the page."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.cluster.budgets import Budget, Verdict
from tests.support.cluster.pods import Pod

MAPPED = re.compile(r"map_(\w+)_[0-9a-f]{32}-arraynode")


@dataclass
class Attempt:
    """One attempt at a node: its pods, including replaced ones, and its end. Times are seconds since 1970."""

    node: str
    task: str
    number: int
    on_spot: bool
    started: float
    pods: list[Pod] = field(default_factory=list)
    ended: float = 0.0
    verdict: Verdict | None = None


def short(task: str) -> str:
    """A task's own name, also if it is mapped."""
    name = task.rpartition(".")[2]
    found = MAPPED.fullmatch(name)
    return found[1] if found else name


class Record:
    """All attempts, cache hits and spent budgets of one execution."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.lock = say, threading.Lock()
        self.started, self.ended = time.time(), 0.0
        self.attempts: list[Attempt] = []
        #: The nodes whose outputs came from the cache, and those that could have done so, with their tasks.
        self.hits: dict[str, str] = {}
        self.cached: dict[str, str] = {}
        self.budgets: dict[str, Budget] = {}

    def line(self, node: str, task: str, what: str) -> None:
        self.say(f"{time.time() - self.started:7.1f} s  {node:<10} {short(task):<22} {what}")

    def looked_up(self, node: str, task: str, hit: bool) -> None:
        with self.lock:
            self.cached[node] = short(task)
            if hit:
                self.hits[node] = short(task)
                self.line(node, task, "cache hit")

    def begin(self, node: str, task: str, number: int, budget: Budget, pods: int) -> Attempt:
        attempt = Attempt(node, short(task), number, budget.on_spot, time.time())
        with self.lock:
            self.attempts.append(attempt)
            self.budgets[node] = budget
            where = "spot" if budget.on_spot else "on demand"
            self.line(node, task, f"attempt {number}: {pods} pod{'s' if pods > 1 else ''}, {where}")
        return attempt

    def end(self, attempt: Attempt, verdict: Verdict) -> None:
        attempt.ended, attempt.verdict = time.time(), verdict
        took = f"attempt {attempt.number}: {attempt.ended - attempt.started:.1f} s"
        with self.lock:
            if verdict.succeeded:
                self.line(attempt.node, attempt.task, f"{took}, succeeded")
            else:
                again = "" if verdict.recoverable else ", not recoverable"
                self.line(attempt.node, attempt.task, f"{took}, failed: {verdict.cause} ({verdict.payer}{again})")

    @property
    def spent(self) -> dict[str, int]:
        """Failures that each budget paid for, over all nodes."""
        return {
            "user": sum(budget.user for budget in self.budgets.values()),
            "system": sum(budget.system for budget in self.budgets.values()),
        }

    def summary(self) -> str:
        nodes, pods = {attempt.node for attempt in self.attempts}, sum(len(attempt.pods) for attempt in self.attempts)
        failed = [attempt for attempt in self.attempts if attempt.verdict and not attempt.verdict.succeeded]
        parts = [f"{len(nodes)} nodes ran in {len(self.attempts)} attempts with {pods} pods"]
        if failed:
            spent = ", ".join(f"{number} paid by the {payer}" for payer, number in self.spent.items())
            parts.append(f"{len(failed)} attempts failed: {spent}")
        parts.append(f"{len(self.hits)} of {len(self.cached)} cached nodes were hits")
        return "; ".join(parts)
