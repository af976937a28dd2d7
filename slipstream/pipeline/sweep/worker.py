"""Worker of a sweep, whose slots train one trial after another until none is left.

Any number of workers communicate only through a shared store. A slot first resumes abandoned trials from their
checkpoints, and starts a new trial only if there are none.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slipstream.config import RunConfig
from slipstream.pipeline.sweep import study
from slipstream.pipeline.sweep.progress import TrialProgressDisplay
from slipstream.pipeline.sweep.records import CurvePoint, RungReported, TrialDied, TrialEnded, TrialHistory
from slipstream.pipeline.sweep.space import SearchedParameter, trial_config
from slipstream.pipeline.sweep.store import OccupiedSlots, SweepStore, early_end_reason
from slipstream.pipeline.sweep.trial import TrialJob, TrialOutcome, train_trial
from slipstream.pipeline.train.checkpoint.home import CHECKPOINTS, complete_checkpoints
from slipstream.pipeline.train.checkpoint.lease import Lease
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.results.training import KIND
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed import fork_server
from slipstream.shared.errors import Preempted, UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.limits import memory_counters, what_was_killed
from slipstream.shared.storage import StorageUnavailable, storage_for

#: Modules preloaded by the server from which trial processes are forked.
MODULES: tuple[str, ...] = ("torch", "slipstream.pipeline.train.run", "slipstream.pipeline.sweep.trial")
#: Seconds between two searches for a trial to train.
POLL_S = 1.0
#: Deaths of a trial's process at the same step after which the trial fails.
DEATHS = 3
LOG = logger("sweep")


@dataclass(frozen=True)
class SweepSearch:
    """User's configuration, searched parameters, and rungs (:func:`slipstream.pipeline.sweep.study.rung_positions`)."""

    config: RunConfig
    parameters: list[SearchedParameter]
    rungs: list[int]


@dataclass(frozen=True)
class WorkerPod:
    """A worker's resources and identity: prepared data, scratch directory, number of processes, lease holder.

    Further fields: execution, and mode and grace period of preemption notices.
    """

    prepared: Path
    scratch: Path
    slots: int
    holder: Holder
    execution: str = ""
    notices: str = "none"
    grace_s: float = 25.0


@dataclass
class LeasedTrial:
    """Trial whose lease a slot holds."""

    trial: TrialHistory
    lease: Lease
    process: BaseProcess | None = None
    #: True if another worker has taken over the lease.
    lost: bool = False

    def lose(self, why: str) -> None:
        LOG.warning("trial %d: %s", self.trial.number, why)
        self.lost = True
        if self.process is not None:
            self.process.kill()


class SweepWorker:
    """Worker of a sweep; :meth:`run` returns when there is no trial left to start or resume."""

    def __init__(self, store: SweepStore, search: SweepSearch, pod: WorkerPod) -> None:
        self._store, self._search, self._pod = store, search, pod
        self._occupation = OccupiedSlots(store, pod.holder)
        #: Guards the store and the slots' trials.
        self._lock = threading.RLock()
        self._taken: dict[int, LeasedTrial] = {}
        #: Whether this machine is being preempted, and whether the slots must end at once.
        self._leaving, self._over = False, threading.Event()
        self._deadline = float("inf")
        self._progress = TrialProgressDisplay(search.config.sweep.trials)

    def run(self) -> None:
        """Train trials until none is left.

        Raises ``UserError`` if the first trials all fail, ``Preempted`` if this machine is preempted, or
        ``StorageUnavailable``. In the last two cases, others continue the trials.
        """
        sweep = self._search.config.sweep
        if sweep.minutes:
            began = self._store.started(self._pod.execution, time.time())
            self._deadline = began + 60 * sweep.minutes
        fork_server.start_fork_server(MODULES)
        with self._sigterm(), self._progress, ThreadPoolExecutor(self._pod.slots) as pool:
            slots = [pool.submit(self._slot, number) for number in range(self._pod.slots)]
            try:
                wait(slots, return_when=FIRST_EXCEPTION)
            finally:
                ended = all(slot.done() and not slot.exception() for slot in slots)
                if not ended:
                    self._end_all()
        for slot in slots:
            slot.result()
        if self._leaving:
            raise Preempted("this machine is about to be preempted; its trials continue elsewhere")

    def _slot(self, number: int) -> None:
        while taken := self._next():
            try:
                self._work(taken, number)
            finally:
                with self._lock:
                    del self._taken[taken.trial.number]
                taken.lease.end()

    # Which trial comes next

    def _next(self) -> LeasedTrial | None:
        """Wait for a trial to train; None if this worker can start or resume no other."""
        while not self._over.is_set() and not self._leaving:
            with self._lock:
                taken, may_come = self._try_to_take()
            if taken or not may_come:
                return taken
            self._over.wait(POLL_S)
        return None

    def _try_to_take(self) -> tuple[LeasedTrial | None, bool]:
        """Return a trial or None, and whether a later call may return one."""
        trials = self._store.trials()
        self._progress.show(trials)
        if why := early_end_reason(trials):
            raise UserError(why)
        may_come = False
        for trial in trials:
            if trial.ended or trial.number in self._taken:
                continue
            seen = self._occupation.look(trial.number)
            if seen.held is False and (taken := self._take(trial, seen.attempt)):
                return taken, True
            # Even for a trial taken just now, it is unknown whether its worker lives.
            may_come = may_come or seen.held is not True
        if len(trials) >= self._search.config.sweep.trials or time.time() >= self._deadline:
            return None, may_come
        proposed = self._store.propose(
            lambda known: study.propose_trial(self._search.config.sweep, self._search.parameters, known)
        )
        return (self._take(proposed, 0) if proposed else None), True

    def _take(self, trial: TrialHistory, after: int) -> LeasedTrial | None:
        found: list[LeasedTrial] = []

        def lost(why: str) -> None:
            for each in found:
                each.lose(why)

        lease = self._occupation.take(trial.number, after, lambda: self._leaving, lost)
        if lease is None:
            return None
        taken = LeasedTrial(trial, lease)
        found.append(taken)
        self._taken[trial.number] = taken
        return taken

    # The work on a trial

    def _work(self, taken: LeasedTrial, slot: int) -> None:
        """Train a trial, from its checkpoint if it has one, and record its end."""
        with TemporaryDirectory(prefix=f"trial-{taken.trial.number:04d}-", dir=self._pod.scratch) as scratch:
            self._train(taken, slot, Path(scratch))

    def _train(self, taken: LeasedTrial, slot: int, scratch: Path) -> None:
        number, started = taken.trial.number, time.perf_counter()
        job = TrialJob(
            prepared=self._pod.prepared,
            config=trial_config(self._search.config, taken.trial.values),
            directory=scratch / "model",
            home=self._store.checkpoints(number),
            holder=self._pod.holder,
            slot=slot,
            notices=self._pod.notices,
            grace_s=self._pod.grace_s,
            log=scratch / "log.txt",
        )
        killed_before = memory_counters()
        outcome, curve = self._follow_until_it_fits(taken, job)
        if taken.lost or self._over.is_set():
            return
        if outcome is None:
            killed = what_was_killed(killed_before, memory_counters())
            outcome = TrialOutcome("failed", killed) if killed else self._died(taken)
        if outcome is None or outcome.state == "superseded":
            return
        if outcome.state == "preempted":
            self._leaving = True
            return
        if outcome.state == "unavailable":
            raise StorageUnavailable(outcome.reason)
        assert outcome.state != "out of memory", "it has failed, or this worker is about to end"
        best = curve[-1].best if curve else None
        seconds = round(time.perf_counter() - started, 3)
        loss = None if outcome.state == "failed" else best
        ended = TrialEnded(outcome.state, loss, curve, seconds, outcome.weights, outcome.reason)
        with self._lock:
            if not taken.trial.values and outcome.state == "complete":
                self._store.keep_model(number, job.directory, Artifact.open(job.directory, KIND).files)
            if outcome.state == "failed":
                self._store.keep_log(number, job.log)
            self._store.append(number, ended)
            self._store.drop_checkpoints(number)
            self._progress.ended(taken.trial, ended, self._store.known())

    def _follow_until_it_fits(self, taken: LeasedTrial, job: TrialJob) -> tuple[TrialOutcome | None, list[CurvePoint]]:
        """Run a trial's process, again with smaller micro-batches after running out of memory.

        The trial fails if memory runs out twice with the same micro-batch count, since a larger one had no effect.
        """
        ran_out = set[int]()
        while True:
            outcome, curve = self._follow(taken, job)
            if outcome is None or outcome.state != "out of memory" or taken.lost or self._over.is_set():
                return outcome, curve
            LOG.warning("trial %d: %s", taken.trial.number, outcome.reason)
            if outcome.micro_batches in ran_out:
                return replace(outcome, state="failed"), curve
            ran_out.add(outcome.micro_batches)

    def _follow(self, taken: LeasedTrial, job: TrialJob) -> tuple[TrialOutcome | None, list[CurvePoint]]:
        """Run a trial's process and answer its reports.

        Returns its outcome (None if it ended without one) and its evaluations.
        """
        curve: list[CurvePoint] = []
        here, there = fork_server.CONTEXT.Pipe()
        with self._lock:  # starting a process changes this one's main module for a moment
            if self._over.is_set():
                return None, curve
            process = fork_server.start_process(train_trial, (there, job))
            taken.process = process
        there.close()
        if self._leaving:
            process.terminate()
        try:
            while True:
                connection.wait([here, process.sentinel])
                if not here.poll():
                    return None, curve
                said: Any = here.recv()
                if isinstance(said, TrialOutcome):
                    return said, curve
                curve = said
                here.send(self._stops(taken.trial.number, curve[-1]))
        except (EOFError, ConnectionError):
            return None, curve
        finally:
            here.close()
            process.join()

    def _stops(self, number: int, point: CurvePoint) -> bool:
        """Return whether the trial stops; at a rung also record its report."""
        sweep, rungs = self._search.config.sweep, self._search.rungs
        if sweep.pruning == "none":
            return False
        with self._lock:
            trials = self._store.trials()
            trial = next(each for each in trials if each.number == number)
            if trial.ended:
                return True
            # A trial resumed from before its last report gets the same answer again.
            told = next((report.stops for report in trial.reports if report.progress == point.progress), None)
            if told is not None or not study.is_due(rungs, trial, point.progress):
                return bool(told)
            report = RungReported(point.progress, point.best, stops=False)
            report = RungReported(point.progress, point.best, study.stops_at_rung(sweep, rungs, trials, trial, report))
            self._store.append(number, report)
            return report.stops

    def _died(self, taken: LeasedTrial) -> TrialOutcome | None:
        """Record a trial process's death; return a failure after :data:`DEATHS` deaths at the same step."""
        number = taken.trial.number
        process = taken.process
        code = process.exitcode if process is not None else None
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        storage = storage_for(self._store.checkpoints(number))
        step = max((each.step for each in complete_checkpoints(storage.list(CHECKPOINTS))), default=0)
        with self._lock:
            self._store.append(number, TrialDied(step, how))
            trial = next(each for each in self._store.known() if each.number == number)
        deaths = sum(each.step == step for each in trial.deaths)
        LOG.warning("trial %d: its process ended with %s; it resumes from step %d", number, how, step)
        if deaths < DEATHS:
            return None
        return TrialOutcome(
            "failed",
            f"its process ended {deaths} times after step {step} without an error message, the last time with {how}",
        )

    # The end

    @contextmanager
    def _sigterm(self) -> Iterator[None]:
        """Handle SIGTERM in the block as a preemption notice: all trainings save and end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def leave(*_: object) -> None:
            self._leaving = True
            for taken in list(self._taken.values()):
                if taken.process is not None:
                    with suppress(ProcessLookupError):
                        taken.process.terminate()

        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _end_all(self) -> None:
        self._over.set()
        for taken in list(self._taken.values()):
            if taken.process is not None:
                taken.process.kill()
