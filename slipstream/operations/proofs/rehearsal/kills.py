"""Faults of a rehearsal: pods that are lost just before a write, drawn from a seed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slipstream.operations.proofs.rehearsal.pods import PodProcess

#: SIGKILL: the machine is lost. SIGTERM: its node shuts down. deleted: drained or evicted. OOMKilled: by exit code.
How = Literal["SIGKILL", "SIGTERM", "deleted", "OOMKilled 0", "OOMKilled 137", "OOMKilled 247"]
#: Faults for which the pod is not to blame.
LOSSES: tuple[How, ...] = ("SIGKILL", "SIGTERM", "deleted")
STRIKES: Mapping[How, Callable[[PodProcess], None]] = {
    "SIGKILL": PodProcess.kill,
    "SIGTERM": PodProcess.terminate,
    "deleted": PodProcess.delete,
    "OOMKilled 0": lambda pod: pod.kill_out_of_memory(0),
    "OOMKilled 137": lambda pod: pod.kill_out_of_memory(137),
    "OOMKilled 247": lambda pod: pod.kill_out_of_memory(247),
}
WRITES = ("PUT", "POST")
#: Objects that are written every few seconds: their number depends on the load of the machine.
BY_THE_CLOCK = ("/leases/", "/ledger/")


@dataclass(frozen=True)
class Kill:
    """Loss of a pod before the ``write``-th write of an attempt at a node; ``index`` is the pod's in its job."""

    node: str
    attempt: int
    write: int
    how: How
    index: int = 0

    def __str__(self) -> str:
        return f"{self.how} of pod {self.index} of {self.node}, attempt {self.attempt}, at its write {self.write}"


@dataclass
class Kills:
    """Plan of pods to kill, and counts of the writes of every attempt. The S3 server reports requests to it."""

    planned: Sequence[Kill] = ()
    fired: list[Kill] = field(default_factory=list)
    writes: Counter[tuple[str, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[str, tuple[str, int, list[PodProcess]]] = {}

    def watch(self, prefix: str, node: str, attempt: int, pods: list[PodProcess]) -> None:
        """Watch the writes of ``pods``, which are below ``prefix`` (``/bucket/key/``)."""
        with self.lock:
            self.running[prefix] = (node, attempt, pods)

    def asked(self, method: str, path: str) -> None:
        """Count a request to S3, before the server acts on it, and kill the planned pods."""
        if method not in WRITES or any(part in path for part in BY_THE_CLOCK):
            return
        with self.lock:
            for prefix, (node, attempt, pods) in self.running.items():
                if not path.startswith(prefix):
                    continue
                self.writes[node, attempt] += 1
                now = (node, attempt, self.writes[node, attempt])
                for kill in self.planned:
                    if (kill.node, kill.attempt, kill.write) == now:
                        self.strike(kill, pods)

    def strike(self, kill: Kill, pods: list[PodProcess]) -> None:
        pod = pods[kill.index]
        if not pod.running:
            return
        pod.struck = kill.how
        self.fired.append(kill)
        STRIKES[kill.how](pod)

    @property
    def missed(self) -> list[Kill]:
        return [kill for kill in self.planned if kill not in self.fired]


def drawn(seed: int, number: int, writes: Mapping[str, int], pods: Mapping[str, int]) -> list[Kill]:
    """Draw at most ``number`` kills from the writes and pods of every node in an undisturbed attempt.

    The node with the most writes is the training, so its second and third attempts are killed, too. They resume, write
    less and are killed early. The first is killed before half of its writes, or the others would find the work
    finished.
    """
    draw = random.Random(seed)

    def last_of(node: str, attempt: int) -> int:
        """Return the last write before which a pod may be killed."""
        parts = 1 if node != training else 2 if attempt == 0 else 8
        return max(1, writes[node] // parts)

    training = max(writes, key=lambda node: (writes[node], node))
    others = sorted(node for node in writes if writes[node] and node != training)
    struck = [(training, attempt) for attempt in range(min(3, number))]
    struck += [(node, 0) for node in draw.sample(others, min(len(others), number - len(struck)))]
    return [
        Kill(
            node,
            attempt,
            draw.randint(1, last_of(node, attempt)),
            draw.choice(LOSSES),
            draw.randrange(pods[node]),
        )
        for node, attempt in struck
    ]
