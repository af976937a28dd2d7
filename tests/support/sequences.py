"""Seeded sequences of overlapping attempts at one training, as propeller makes them: retries, recoveries and
relaunches, each with an unpredictable shard, and their expected results.

Every attempt is real: processes that train, with their home on a disk or on S3, and that are killed, told to end, or
stopped and let go on when they have long been succeeded.
"""

import dataclasses
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.flyte.homes import raw_output_base
from slipstream.operations.proofs.gpu.attempts import InjectedFault, RunningAttempt, TrainingJob, start_attempt
from slipstream.operations.proofs.rehearsal.rendering import raw_output
from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory, CheckpointName
from slipstream.pipeline.train.checkpoint.lease import wait_for_others
from slipstream.pipeline.train.checkpoint.unfinished import finished_result
from slipstream.shared.artifacts.workspaces import Holder, home_below
from slipstream.shared.storage import storage_for

#: How an attempt ends early: before, during and after its first save.
ENDS = {
    "lost before it claimed its home": InjectedFault("begin"),
    "lost before it looked what there is": InjectedFault("inherit"),
    "lost before its first save": InjectedFault("step", at=2),
    "lost in its first save, before its files were stored": InjectedFault("upload"),
    "lost in its first save, before its manifest was stored": InjectedFault("manifest"),
    "lost after its first save": InjectedFault("step", at=5),
    "lost after a later save": InjectedFault("step", at=9),
    "told to end": InjectedFault("step", "SIGTERM", at=4),
    "told to end later": InjectedFault("step", "SIGTERM", at=8),
}
#: Origin of an attempt after an ended one: the next of its execution, or an execution of another name.
NEXT = ("retried", "retried", "recovered", "relaunched")
#: A lease expires after half a second without heartbeats. Half of that would be too short for a new client of S3.
LEASE = {"PERIOD_S": 0.1, "HASTE_S": 0.1, "GLANCE_S": 0.02, "SILENT_PERIODS": 6, "SHARE_OF_TIMEOUT": 20}
RESUMED = re.compile(r"resumes from step (\d+) \((\S+)\)")


def stopped(pid: int | None) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@dataclass
class Sequence:
    """One training, its attempts one after another; ``base`` is where Flyte keeps raw output, a directory or a prefix
    of S3."""

    job: TrainingJob
    base: str
    seed: int
    happened: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.execution = self.number = self.attempts = 0
        #: Checkpoints that were completed by an attempt after its successor had looked what there is.
        self.too_late: set[str] = set()

    def holder(self) -> Holder:
        name = f"f{self.seed}-{self.execution}"
        return Holder(name, self.number, raw_output(self.base, name, "n0", self.number))

    @property
    def address(self) -> str:
        """The home, as a pod of this attempt works it out from the prefix that it is given."""
        return home_below(raw_output_base(self.holder().prefix), "key", "project", "development")

    @property
    def home(self) -> CheckpointDirectory:
        return CheckpointDirectory(storage_for(self.address))

    def this_job(self) -> TrainingJob:
        """The next attempt, with a log of its own."""
        self.attempts += 1
        return dataclasses.replace(
            self.job,
            place=self.job.place / f"attempt-{self.attempts}",
            home=self.address,
            holder=self.holder(),
            lease=LEASE,
        )

    def then(self, how: str) -> None:
        """Name the next attempt."""
        if how == "retried":
            self.number += 1
        else:
            self.execution, self.number = self.execution + 1, 0

    def begin(self, *faults: InjectedFault) -> RunningAttempt:
        """Begin an attempt as its agent does."""
        assert not finished_result(
            self.address, self.holder(), waited=wait_for_others(self.address, self.holder(), "wait")
        )
        return start_attempt(self.this_job(), *faults)

    def check(self, running: RunningAttempt, saved: CheckpointName | None) -> None:
        """An attempt that began when ``saved`` was the newest checkpoint did not begin before it, and with nothing that
        was completed too late. Raises ``AssertionError``."""
        log = (running.job.place / "log-0").read_text()
        found = RESUMED.search(log)
        if found is None:
            died_before = any(fault.where in ("begin", "inherit") for fault in running.faults)
            assert saved is None or died_before, f"{self.happened}: {saved} was saved, begins at step 0: {log}"
            return
        assert found[2].rpartition("/")[2] not in self.too_late, f"{self.happened}: restored a zombie's {found[2]}"
        assert saved is None or int(found[1]) >= saved.step, f"{self.happened}: {saved} was saved, {found[0]}"

    # What happens

    def ended_early(self) -> bool:
        """One attempt that is lost or told to end; whether it reached the end before."""
        how, fault = self.draw.choice(list(ENDS.items()))
        saved = next(iter(self.home.checkpoints()), None)
        # Only rank 0 looks what there is, and completes a checkpoint.
        rank = 0 if fault.where in ("inherit", "manifest") else self.draw.randrange(self.job.world)
        running = self.begin(dataclasses.replace(fault, rank=rank))
        ended = running.finish()
        assert ended.fired or ended.finished, f"{how}: did not happen; see {running.job.place}"
        self.check(running, saved)
        self.happened.append(how if ended.fired else "reached its end")
        return ended.finished

    def cut_off(self) -> None:
        """An attempt whose machine is cut off, between two steps or amid a save: its processes stop; its successor
        begins; then they go on."""
        moment = self.draw.choice([InjectedFault("step", "SIGSTOP", at=6), InjectedFault("manifest", "SIGSTOP", at=2)])
        running = self.begin(moment)
        # Rank 0 stops by itself; a signal before that would leave it stopped when it is to go on.
        self.until(running, lambda: stopped(running.ranks[0].pid))
        running.signal(signal.SIGSTOP)
        saved = next(iter(self.home.checkpoints()), None)
        before = self.claims()
        self.then(self.draw.choice(NEXT))
        successor = self.begin(InjectedFault("step", at=self.draw.choice([3, 6, 9])))
        end = time.monotonic() + 60
        while not self.home.is_inherited(before):
            assert time.monotonic() < end, f"the successor did not begin; see {successor.job.place}"
            time.sleep(0.01)
        counted = set(map(str, self.home.checkpoints()))
        running.signal(signal.SIGCONT)
        zombie = running.finish()
        assert not zombie.finished, f"a zombie went on to the end; see {running.job.place}"
        listed = {key.partition("/")[0] for key in self.home.storage.list("step-") if key.endswith("/manifest.json")}
        self.too_late |= {
            name for name in listed - counted if (parsed := CheckpointName.parse(name)) and parsed.attempt <= before
        }
        successor.finish()
        self.check(successor, saved)
        self.happened.append(f"cut off at its {moment.where}" + ", which came too late" * bool(self.too_late))

    def two_at_once(self) -> None:
        """Another execution of the same training begins while one is at work, and waits until that is lost."""
        before = self.claims()
        running = self.begin(InjectedFault("step", at=self.draw.choice([4, 7, 10])))
        self.until(running, lambda: self.claims() > before)
        self.then("relaunched")
        waited: list[bool] = []
        address, holder = self.address, self.holder()
        second = threading.Thread(target=lambda: waited.append(wait_for_others(address, holder, "wait")))
        second.start()
        time.sleep(0.1)
        # Rank 0 holds the lease; once it has ended, its agent ends the others.
        assert not waited or not running.ranks[0].is_alive(), "two at once"
        running.finish()
        second.join(30)
        assert waited, "the second attempt waits endlessly"
        self.happened.append("two at once")

    def run(self) -> None:
        """Run a random number of disturbed attempts, and then an undisturbed one."""
        for _ in range(self.draw.randint(2, 4)):
            what = self.draw.random()
            if what < 0.2:
                self.cut_off()
            elif what < 0.35:
                self.two_at_once()
            elif self.ended_early():
                return
            self.then(self.draw.choice(NEXT))
        saved = next(iter(self.home.checkpoints()), None)
        running = self.begin()
        assert running.finish().finished, f"{self.happened}: did not end; see {running.job.place}"
        self.check(running, saved)

    # Moments

    def claims(self) -> int:
        return max((int(key.rpartition("/")[2]) for key in self.home.storage.list("claims/")), default=0)

    def until(self, running: RunningAttempt, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < end, f"see {running.job.place}"
            if not all(process.is_alive() for process in running.ranks):
                return
            time.sleep(0.002)
