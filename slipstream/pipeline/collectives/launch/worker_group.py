"""Worker group that launches fresh process groups, any number of times.

Timings differ more between process groups than within one, and libraries read some variables only at process start. So
the measuring ranks (one per process under torchrun and Flyte, otherwise all in one process) are parents only: for every
launch they start one worker process per rank. The workers form a process group through the parents' store, under a
separate key prefix. The parents agree on the outcome, name the rank that died or does not answer, and kill the
remaining workers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

import torch.distributed as dist

from slipstream.pipeline.collectives.launch.worker import (
    WorkerOutcome,
    WorkerProcess,
    WorkerSpec,
    raise_if_failed,
    ranks_in_words,
)
from slipstream.shared.distributed.names import names_of_this_machine
from slipstream.shared.errors import Interrupted, UserError

#: Seconds between two polls of the store; seconds that workers get to end after one has failed.
POLL, GRACE = 0.2, 5.0
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class LeaderUnreachable(Interrupted):
    """Error of a rank that cannot reach rank 0's process."""


@dataclass
class WorkerGroup:
    """Parents of the workers; every parent process holds one instance."""

    store: dist.Store
    host: str
    port: int
    #: Number of ranks; ranks whose workers this process starts; number of ranks on this machine.
    world: int
    ranks: tuple[int, ...]
    local_world: int
    #: Seconds after which a rank that does not arrive or answer is an error.
    timeout: float
    #: Local rank of this process's first worker; a worker uses the GPU of its local rank.
    first_local: int = 0
    prefix: str = ""
    #: Name lookup that the store needs until all ranks have connected.
    _until_rendezvous: ExitStack = field(default_factory=ExitStack)
    _launches: int = field(default=0, init=False)

    @classmethod
    def local(cls, processes: int, timeout: float) -> WorkerGroup:
        """Create a group whose ranks are all on this machine, with this process as the only parent."""
        with names_of_this_machine("127.0.0.1"):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return cls(store, "127.0.0.1", store.port, processes, tuple(range(processes)), processes, timeout)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], timeout: float) -> WorkerGroup:
        """Create the group from the variables that torchrun or Flyte's Elastic task sets.

        Raises ``UserError`` if a variable is missing, ``LeaderUnreachable`` if rank 0's machine cannot be reached in
        time.
        """
        missing = [name for name in ENVIRONMENT if name not in environment]
        if missing:
            raise UserError(
                f"{' and '.join(missing)}: not in the environment, though {ENVIRONMENT[0]} or another of torchrun's "
                "is; start this with torchrun, or without any of them for processes of its own"
            )
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        hosts_store = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # Until the rendezvous: the store's thread looks up the name of every process that connects to it.
        until_rendezvous = ExitStack()
        until_rendezvous.enter_context(names_of_this_machine(host))
        try:
            store = dist.TCPStore(
                host, port, is_master=hosts_store, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except dist.DistError as error:
            until_rendezvous.close()
            raise LeaderUnreachable(
                f"rank {rank}: rank 0 at {host}:{port} cannot be reached within {timeout:g} s"
            ) from error
        local_world, local = int(environment.get("LOCAL_WORLD_SIZE", "1")), int(environment["LOCAL_RANK"])
        prefix = f"attempt-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
        return cls(store, host, port, world, (rank,), local_world, timeout, local, prefix, until_rendezvous)

    @property
    def is_leader(self) -> bool:
        """True if this process has rank 0, which decides, writes and reports."""
        return 0 in self.ranks

    # Communication between the parents

    def send(self, key: str, value: object) -> None:
        self.store.set(self.prefix + key, json.dumps(value))

    def receive(self, key: str) -> Any:
        """Return the value that was sent under ``key``.

        Raises ``LeaderUnreachable`` after the timeout.
        """
        deadline = time.monotonic() + self.timeout
        while not self.store.check([self.prefix + key]):
            if time.monotonic() > deadline:
                raise LeaderUnreachable(f"no answer from rank 0 within {self.timeout:g} s")
            time.sleep(POLL / 4)
        return json.loads(self.store.get(self.prefix + key))

    def broadcast(self, key: str, value: Callable[[], object]) -> Any:
        """Call ``value`` in rank 0's process and return its result (JSON) in all.

        A ``UserError`` from ``value`` is raised in all.
        """
        if self.is_leader:
            try:
                message = {"value": value()}
            except UserError as error:
                message = {"refused": error.message}
            self.send(key, message)
        message = self.receive(key)
        if "refused" in message:
            raise UserError(message["refused"])
        return message["value"]

    def gather(self, key: str, values: Mapping[int, object], patience: float) -> dict[int, Any]:
        """Send ``values`` (JSON, by rank) and return all ranks' values that arrive in ``patience`` seconds."""
        for rank, value in values.items():
            self.send(f"{key}/{rank}", value)
        deadline, waiting = time.monotonic() + patience, set(range(self.world))
        while True:
            waiting = {rank for rank in waiting if not self.store.check([f"{self.prefix}{key}/{rank}"])}
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(POLL / 4)
        arrived = sorted(set(range(self.world)) - waiting)
        return {rank: json.loads(self.store.get(f"{self.prefix}{key}/{rank}")) for rank in arrived}

    def rendezvous(self, versions: Mapping[str, str]) -> None:
        """Wait for all ranks and check that they have the same ``versions`` (by name).

        Raises ``Interrupted`` naming the missing ranks, or ``UserError`` naming the first rank with another version.
        """
        with self._until_rendezvous:
            arrived = self.gather("hello", dict.fromkeys(self.ranks, versions), self.timeout)
        if missing := [rank for rank in range(self.world) if rank not in arrived]:
            raise Interrupted(f"{ranks_in_words(missing)} of {self.world} did not arrive within {self.timeout:g} s")
        for rank, theirs in arrived.items():
            for name in theirs:
                if theirs[name] != arrived[0].get(name):
                    raise UserError(
                        f"rank {rank} has {name} {theirs[name]}, rank 0 has {arrived[0].get(name)}; all ranks have to "
                        "run the same versions"
                    )

    @contextmanager
    def exit_barrier(self) -> Iterator[None]:
        """Let rank 0's process, which hosts the store, exit last."""
        try:
            yield
        finally:
            with suppress(dist.DistError, RuntimeError):  # rank 0's process has already ended
                self.gather("done", dict.fromkeys(self.ranks, True), GRACE if self.is_leader else 0)

    # Workers

    def launch(
        self,
        work: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        ranks_by_host: Sequence[Sequence[int]] = (),
    ) -> Any:
        """Return ``work(worker_context, *arguments)`` of rank 0 of a fresh process group.

        None in processes without rank 0. ``environment`` is added to the workers' environment. ``ranks_by_host`` are
        the participating ranks, including rank 0; all ranks if empty. Raises on all ranks: ``UserError`` if a rank
        refused, ``Interrupted`` naming the rank that died or did not answer, ``RuntimeError`` for anything else.
        """
        self._launches += 1
        name = f"launch-{self._launches}"
        workers: dict[int, WorkerProcess] = {}
        # The thread of rank 0's store looks up the name of every worker that connects. So workers start only when rank
        # 0 is in this block, which it leaves when all have ended.
        with names_of_this_machine(self.host):
            self.broadcast(f"{name}/open", lambda: True)
            try:
                for spec, rank in self._worker_specs(ranks_by_host, f"{self.prefix}{name}/workers"):
                    workers[rank] = WorkerProcess(spec, environment or {}, work, arguments)
                outcomes = self._watch(workers, f"{self.prefix}{name}/failure")
                if not workers:
                    self._until_any(f"{self.prefix}{name}/outcome/0", f"{self.prefix}{name}/failure")
            finally:
                for worker in workers.values():
                    worker.kill()
            outcomes = self._gather_outcomes(
                f"{name}/outcome", dict.fromkeys(self.ranks, WorkerOutcome("done")) | outcomes
            )
        raise_if_failed(outcomes, self.timeout)
        return workers[0].result if self.is_leader else None

    def _gather_outcomes(self, key: str, own: Mapping[int, WorkerOutcome]) -> dict[int, WorkerOutcome]:
        """Return the outcomes of all ranks' workers; ``own`` are those of this process."""
        values = {rank: [outcome.kind, outcome.why, outcome.during] for rank, outcome in own.items()}
        succeeded = all(outcome.kind == "done" for outcome in own.values())
        received = self.gather(key, values, self.timeout if succeeded else 2 * GRACE)
        missing = ("silent", "", "its launch")
        return {rank: WorkerOutcome(*received.get(rank, missing)) for rank in range(self.world)}

    def _worker_specs(self, ranks_by_host: Sequence[Sequence[int]], prefix: str) -> Iterator[tuple[WorkerSpec, int]]:
        members = sorted(chain.from_iterable(ranks_by_host)) or list(range(self.world))
        for number, rank in enumerate(self.ranks):
            if rank in members:
                local_world = next((len(host) for host in ranks_by_host if rank in host), self.local_world)
                place = (members.index(rank), len(members), self.first_local + number, local_world)
                yield WorkerSpec(*place, self.host, self.port, prefix, self.timeout), rank

    def _until_any(self, *keys: str) -> None:
        while not any(self.store.check([key]) for key in keys):
            time.sleep(POLL)

    def _watch(self, workers: Mapping[int, WorkerProcess], failure: str) -> dict[int, WorkerOutcome]:
        """Return the outcomes of this process's workers.

        Once a worker of any rank fails, the others are killed after ``GRACE`` seconds.
        """
        outcomes: dict[int, WorkerOutcome] = {}
        deadline: float | None = None
        while waiting := workers.keys() - outcomes.keys():
            for rank in waiting:
                if outcome := workers[rank].outcome(POLL / len(waiting)):
                    outcomes[rank] = outcome
                    if outcome.kind != "done":
                        self.store.set(failure, "")
            if deadline is None and self.store.check([failure]):
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() > deadline:
                outcomes |= {rank: workers[rank].kill() for rank in workers.keys() - outcomes.keys()}
        return outcomes
