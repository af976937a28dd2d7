"""Fresh process groups, as often as needed, out of the ranks of one: each rank starts a child, the children meet.

Figures differ more between process groups than within one, and what a library reads once it reads at the start of a
process. So the ranks of a measurement (one per process under torchrun and Flyte, all of them in one process otherwise)
join no group themselves. They are parents: for each launch they start a child per rank, the children meet through the
parents' store under a prefix of their own, and the parents agree on the outcome, name the rank that died or does not
answer, and end the children that are left.
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

from tasks.collectives.launch.child import Running, Seat
from tasks.collectives.launch.outcome import Outcome, named, raise_if_failed
from tasks.distributed.names import names_of_this_machine
from tasks.errors import Interrupted, UserError

#: Seconds between two looks at the store, and those that a child gets to end once another rank's has failed.
LOOK, GRACE = 0.2, 5.0
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class NoLeader(Interrupted):
    """The process of rank 0 cannot be reached, or says nothing."""


@dataclass
class Crew:
    """This process's part of a group of parents."""

    store: dist.Store
    host: str
    port: int
    #: Number of ranks, those that this process starts children for, and how many of all are on this machine.
    world: int
    ranks: tuple[int, ...]
    local_world: int
    #: Seconds after which a rank that does not come or answer is given up.
    timeout: float
    #: The first of the local ranks, by which GPUs are chosen.
    first_local: int = 0
    prefix: str = ""
    #: What ends when all ranks have met.
    _meeting: ExitStack = field(default_factory=ExitStack)
    _launches: int = field(default=0, init=False)

    @classmethod
    def here(cls, processes: int, timeout: float) -> Crew:
        """All ranks on this machine, as children of this process."""
        with names_of_this_machine("127.0.0.1"):
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return cls(store, "127.0.0.1", store.port, processes, tuple(range(processes)), processes, timeout)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], timeout: float) -> Crew:
        """One rank, as torchrun or Flyte's Elastic task started it. Raises ``UserError`` if a variable is missing,
        ``NoLeader`` if rank 0's machine cannot be reached in time."""
        missing = [name for name in ENVIRONMENT if name not in environment]
        if missing:
            raise UserError(
                f"{' and '.join(missing)}: not in the environment, though {ENVIRONMENT[0]} or another of torchrun's "
                "is; start this with torchrun, or without any of them for processes of its own"
            )
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        hosts_store = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # Until all have met: the thread of the store asks for the name of each process that connects to it.
        meeting = ExitStack()
        meeting.enter_context(names_of_this_machine(host))
        try:
            store = dist.TCPStore(
                host, port, is_master=hosts_store, wait_for_workers=False, timeout=timedelta(seconds=timeout)
            )
        except dist.DistError as error:
            meeting.close()
            raise NoLeader(f"rank {rank}: rank 0 at {host}:{port} cannot be reached within {timeout:g} s") from error
        local_world, local = int(environment.get("LOCAL_WORLD_SIZE", "1")), int(environment["LOCAL_RANK"])
        prefix = f"attempt-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
        return cls(store, host, port, world, (rank,), local_world, timeout, local, prefix, meeting)

    @property
    def leads(self) -> bool:
        """Whether rank 0 is among this process's: it decides, writes and speaks."""
        return 0 in self.ranks

    # What the parents tell each other

    def say(self, key: str, value: Any) -> None:
        self.store.set(self.prefix + key, json.dumps(value))

    def hear(self, key: str) -> Any:
        """Raises ``NoLeader`` unless rank 0 says it within the timeout."""
        deadline = time.monotonic() + self.timeout
        while not self.store.check([self.prefix + key]):
            if time.monotonic() > deadline:
                raise NoLeader(f"no word from rank 0 within {self.timeout:g} s")
            time.sleep(LOOK / 4)
        return json.loads(self.store.get(self.prefix + key))

    def from_leader(self, key: str, value: Callable[[], Any]) -> Any:
        """What ``value`` gives on the process that leads (JSON), on all. A ``UserError`` there is raised on all."""
        if self.leads:
            try:
                said = {"value": value()}
            except UserError as error:
                said = {"refused": error.message}
            self.say(key, said)
        said = self.hear(key)
        if "refused" in said:
            raise UserError(said["refused"])
        return said["value"]

    def from_all(self, key: str, values: Mapping[int, Any], patience: float) -> dict[int, Any]:
        """What each rank says (JSON); without those that say nothing within ``patience`` seconds."""
        for rank, value in values.items():
            self.say(f"{key}/{rank}", value)
        deadline, waiting = time.monotonic() + patience, set(range(self.world))
        while True:
            waiting = {rank for rank in waiting if not self.store.check([f"{self.prefix}{key}/{rank}"])}
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(LOOK / 4)
        said = sorted(set(range(self.world)) - waiting)
        return {rank: json.loads(self.store.get(f"{self.prefix}{key}/{rank}")) for rank in said}

    def meet(self, mine: Mapping[str, str]) -> None:
        """Wait for all ranks, and see that they are alike in ``mine`` (versions by name). Raises ``Interrupted`` naming
        the ranks that did not come, ``UserError`` naming the first that differs."""
        with self._meeting:
            came = self.from_all("hello", dict.fromkeys(self.ranks, mine), self.timeout)
        if missing := [rank for rank in range(self.world) if rank not in came]:
            raise Interrupted(f"{named(missing)} of {self.world} did not arrive within {self.timeout:g} s")
        for rank, its in came.items():
            for name in its:
                if its[name] != came[0].get(name):
                    raise UserError(
                        f"rank {rank} has {name} {its[name]}, rank 0 has {came[0].get(name)}; all ranks have to run "
                        "the same versions"
                    )

    @contextmanager
    def until_all_are_done(self) -> Iterator[None]:
        """The store lives in rank 0's process, which therefore leaves last."""
        try:
            yield
        finally:
            with suppress(dist.DistError, RuntimeError):  # rank 0's process is gone: there is nobody left to tell
                self.from_all("done", dict.fromkeys(self.ranks, True), GRACE if self.leads else 0)

    # Children

    def launch(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        among: Sequence[Sequence[int]] = (),
    ) -> Any:
        """What ``work(child, *arguments)`` gives on rank 0 of a fresh process group; None in processes without rank 0.

        ``environment`` is added to the children's. ``among`` are the ranks that take part, by host, rank 0 one of them;
        all if it is empty. Raises on all ranks: ``UserError`` if a rank refused, ``Interrupted`` naming the rank that
        died or did not answer, ``RuntimeError`` for anything else.
        """
        self._launches += 1
        name = f"launch-{self._launches}"
        children: dict[int, Running] = {}
        try:
            with names_of_this_machine(self.host):
                for seat, rank in self._seats(among, f"{self.prefix}{name}/children"):
                    children[rank] = Running(seat, environment or {}, work, arguments)
                outcomes = self._watch(children, f"{self.prefix}{name}/trouble")
            if not children:
                self._until_any(f"{self.prefix}{name}/outcome/0", f"{self.prefix}{name}/trouble")
        finally:
            for child in children.values():
                child.kill()
        outcomes = dict.fromkeys(self.ranks, Outcome("done")) | outcomes
        said = {rank: [outcome.kind, outcome.why, outcome.during] for rank, outcome in outcomes.items()}
        all_well = all(outcome.kind == "done" for outcome in outcomes.values())
        heard = self.from_all(f"{name}/outcome", said, self.timeout if all_well else 2 * GRACE)
        unheard = ("silent", "", "its launch")
        raise_if_failed({rank: Outcome(*heard.get(rank, unheard)) for rank in range(self.world)}, self.timeout)
        return children[0].result if self.leads else None

    def _seats(self, among: Sequence[Sequence[int]], prefix: str) -> Iterator[tuple[Seat, int]]:
        """The seats of this process's ranks in a group, and which they are outside of it."""
        members = sorted(chain.from_iterable(among)) or list(range(self.world))
        for number, rank in enumerate(self.ranks):
            if rank in members:
                here = next((len(host) for host in among if rank in host), self.local_world)
                place = (members.index(rank), len(members), self.first_local + number, here)
                yield Seat(*place, self.host, self.port, prefix, self.timeout), rank

    def _until_any(self, *keys: str) -> None:
        while not any(self.store.check([key]) for key in keys):
            time.sleep(LOOK)

    def _watch(self, children: Mapping[int, Running], trouble: str) -> dict[int, Outcome]:
        """How each of this process's children ended. Once one of any process has failed, the others get ``GRACE``."""
        outcomes: dict[int, Outcome] = {}
        deadline: float | None = None
        while waiting := children.keys() - outcomes.keys():
            for rank in waiting:
                if outcome := children[rank].outcome(LOOK / len(waiting)):
                    outcomes[rank] = outcome
                    if outcome.kind != "done":
                        self.store.set(trouble, "")
            if deadline is None and self.store.check([trouble]):
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() > deadline:
                outcomes |= {rank: children[rank].kill() for rank in children.keys() - outcomes.keys()}
        return outcomes
