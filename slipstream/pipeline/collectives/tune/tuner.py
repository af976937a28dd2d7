"""Tuner: coordinate descent over candidate settings, measured on training steps.

Candidates are compared with the best settings so far. All processes of a worker group run the tuner in step; rank 0's
decides. Settings that a running process can change are compared in turns within one launch. Settings that libraries
read only at start are compared over interleaved launches of fresh processes, and must also speed up a bare all_reduce.
A failing candidate is dropped with the reason.

Never tried: LL128, which can corrupt data where it is not supported. Bucket sizes that yield the buckets of an earlier
size are skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.engine import made_by, rendezvous_and_check
from slipstream.pipeline.collectives.launch.measurements import inspect_group
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.pipeline.collectives.tune.decision import FEWEST_TURNS, SpeedTest, compare_settings
from slipstream.pipeline.collectives.tune.steps import Model, measure_compute, time_alternately, time_in_one_launch
from slipstream.shared.errors import Interrupted, UserError
from slipstream.shared.interconnect.history import ProfileHistory, TuningHistory
from slipstream.shared.interconnect.model.hockney import Compute, bucket_sizes
from slipstream.shared.interconnect.model.predictions import step_lines
from slipstream.shared.interconnect.profile import NetworkProfile
from slipstream.shared.interconnect.tuning import (
    COPIED,
    FOR_ALL_REDUCE,
    DdpSettings,
    TrialVerdict,
    Tuning,
    TuningTrial,
    changes_numbers,
)
from slipstream.shared.logs import logger

BUCKETS_MB = (5, 10, 50, 100, 250)
#: Variables that are set together, and reasonable alternatives to their defaults. NCCL and RCCL read them once.
NCCL: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("NCCL_ALGO",), tuple(FOR_ALL_REDUCE + algorithm for algorithm in ("ring", "tree", "nvls"))),
    (("NCCL_PROTO",), ("Simple", "LL")),
    (("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"), ("4", "8", "16", "32")),
    (("NCCL_BUFFSIZE",), ("2097152", "8388608")),
    (("NCCL_NTHREADS",), ("256",)),
    (("NCCL_P2P_NET_CHUNKSIZE",), ("262144", "524288")),
    (("NCCL_IB_QPS_PER_CONNECTION",), ("2", "4", "8")),
)


@dataclass(frozen=True)
class TuningCandidate:
    """Values for some settings, tried on top of the best settings so far."""

    name: str
    #: Fields of :class:`~slipstream.shared.interconnect.tuning.DdpSettings`.
    ddp: dict[str, Any] = field(default_factory=dict)
    #: Environment variables for fresh processes; empty if a running process can change the settings.
    environment: dict[str, str] = field(default_factory=dict)

    def may_change_numbers(self, world: int) -> bool:
        return any(changes_numbers(name, world) for name in (*self.ddp, *self.environment))

    def applied(self, to: DdpSettings) -> DdpSettings:
        return replace(to, **self.ddp)


def tuning_candidates(
    backend: str, gradients: Sequence[int], interfaces: Iterable[str], used: Container[str]
) -> tuple[TuningCandidate, ...]:
    """Return the candidates, the largest possible gains first, as the time may run out.

    ``gradients`` are the bytes of every gradient, ``interfaces`` exist on all hosts, ``used`` are those that gloo
    itself chose.
    """
    found = [
        TuningCandidate("fp16 compression hook", {"hook": "fp16"}),
        *bucket_candidates(gradients),
        TuningCandidate(COPIED, {"gradient_as_bucket_view": False}),
        TuningCandidate("static_graph", {"static_graph": True}),
    ]
    if backend == "gloo":
        others = [name for name in interfaces if name not in used]
        found += [TuningCandidate(f"GLOO_SOCKET_IFNAME={name}", {}, {"GLOO_SOCKET_IFNAME": name}) for name in others]
    if backend == "nccl":
        found += [nccl_candidate(names, value) for names, values in NCCL for value in values]
    return tuple(found)


def bucket_candidates(gradients: Sequence[int]) -> list[TuningCandidate]:
    known, found = [bucket_sizes(gradients)], []
    for megabytes in BUCKETS_MB:
        buckets = bucket_sizes(gradients, megabytes << 20, megabytes << 20)
        if buckets not in known:
            known.append(buckets)
            found.append(TuningCandidate(f"bucket_cap_mb={megabytes}", {"bucket_cap_mb": megabytes}))
    return found


def nccl_candidate(names: Sequence[str], value: str) -> TuningCandidate:
    return TuningCandidate(", ".join(f"{name}={value}" for name in names), {}, dict.fromkeys(names, value))


LOG = logger("collectives")
#: Least time of measuring, as a part of the time for starting processes.
LEAST = 0.5
#: Part of ``collectives.tune_seconds`` by which a candidate in progress may exceed it.
OVER = 0.1


def tune_settings(workers: WorkerGroup, config: CollectivesConfig, model: Model) -> Tuning | None:
    """Find settings with which training steps of ``model`` are faster; all processes of ``workers`` call this.

    Returns the recommendation in rank 0's process, None in the others. Raises the same error on all ranks:
    ``UserError``, or ``Interrupted`` naming a rank that is missing or died.
    """
    with workers.exit_barrier():
        rendezvous_and_check(workers)
        began = time.monotonic()
        ends = began + config.tune_seconds
        prepared: tuple[Any, Any] = workers.launch(inspect_and_compute, config, model) or (None, None)
        empty, compute = prepared
        launch_s = time.monotonic() - began

        def begin() -> list[dict[str, object]]:
            TuningHistory(config.history, empty.fingerprint).check_writable()
            return [asdict(each) for each in list_candidates(empty, compute)]

        listed = workers.broadcast("tune/candidates", begin)
        spare = OVER * config.tune_seconds
        tuner = Tuner(workers, model, len(listed), config.numbers == "may_change", ends=ends, spare=spare)
        trials = []
        for number, candidate in enumerate(TuningCandidate(**fields) for fields in listed):
            starts = launch_s * (2 * FEWEST_TURNS if candidate.environment else 1)
            share = partial(share_of_time, ends, len(listed) - number, starts)
            seconds = workers.broadcast(f"tune/{number}/seconds", share)
            trial = tuner.evaluate(candidate, seconds)
            trials.append(trial)
            if workers.broadcast(f"tune/{number}/taken", partial(bool, trial.verdict == "taken")):
                tuner.adopt(candidate)
            if workers.is_leader:
                LOG.info("%s", trial)
    if not workers.is_leader:
        return None
    expected = tuple(step_lines(ProfileHistory(config.history, empty.fingerprint).latest(), compute))
    tuning = Tuning(empty.fingerprint, str(model), tuner.ddp, tuner.environment, tuple(trials), expected)
    LOG.info(
        "the tuner's result was published at %s",
        TuningHistory(config.history, empty.fingerprint).publish(tuning, made_by(config)),
    )
    return tuning


def inspect_and_compute(
    worker: WorkerContext, config: CollectivesConfig, model: Model
) -> tuple[NetworkProfile, Compute]:
    """Return the group without measurements, and the times of a step without communication."""
    return inspect_group(worker, config), measure_compute(worker, model)


def share_of_time(ends: float, left: int, starts: float) -> float:
    """Return the seconds of measuring that a candidate has, after ``starts`` seconds for starting processes.

    It has an equal part of the time until ``ends`` with ``left`` candidates, but enough to measure anything; 0 if that
    is more than what remains.
    """
    remaining = ends - time.monotonic()
    share = max(remaining / left, (1 + LEAST) * starts)
    return share - starts if share <= remaining else 0.0


def list_candidates(empty: NetworkProfile, compute: Compute) -> tuple[TuningCandidate, ...]:
    """Return the candidates for an inspected group."""
    names = [{line.partition(":")[0] for line in host.interfaces} for host in empty.topology.hosts]
    shared = sorted(set.intersection(*names)) if names else []
    used = {line.partition(" ")[0] for line in empty.topology.transports}
    return tuning_candidates(empty.fingerprint.backend, compute.gradients, shared, used)


@dataclass
class Tuner:
    """Best settings so far, and the comparison of candidates with them."""

    workers: WorkerGroup
    model: Model
    #: Number of all candidates, for the Bonferroni correction.
    candidates: int
    may_change_numbers: bool
    ddp: DdpSettings = field(default_factory=DdpSettings)
    environment: dict[str, str] = field(default_factory=dict)
    #: End of the time on this process's clock (rank 0's counts), and seconds by which a candidate may exceed its own.
    ends: float = math.inf
    spare: float = math.inf

    def adopt(self, candidate: TuningCandidate) -> None:
        self.ddp = candidate.applied(self.ddp)
        self.environment |= candidate.environment

    def evaluate(self, candidate: TuningCandidate, seconds: float) -> TuningTrial:
        """Compare a candidate with the best settings so far, for ``seconds``.

        The trial is meaningful only in rank 0's process.
        """
        untried = TuningTrial(candidate.name, "not tried", why="the time was over; give collectives.tune_seconds more")
        if not seconds:
            return untried
        try:
            compare = self._over_launches if candidate.environment else self._in_turns
            decisions = compare(candidate, seconds)
        except (UserError, Interrupted, RuntimeError) as error:
            return TuningTrial(candidate.name, "failed", why=str(error).strip().splitlines()[-1])
        if self.workers.is_leader and not decisions:
            return untried
        return (
            self._judged(candidate, decisions) if self.workers.is_leader else TuningTrial(candidate.name, "no change")
        )

    def _in_turns(self, candidate: TuningCandidate, seconds: float) -> list[SpeedTest]:
        other = candidate.applied(self.ddp)
        turns = self.workers.launch(
            time_alternately, self.model, self.ddp, other, seconds, seconds + self.spare, environment=self.environment
        )
        enough = turns and len(turns[0]) >= FEWEST_TURNS
        return [compare_settings(turns[0], turns[1], self.candidates)] if enough else []

    def _over_launches(self, candidate: TuningCandidate, seconds: float) -> list[SpeedTest]:
        """Compare alternate launches without and with the candidate's variables.

        Returns the decisions for a bare all_reduce and for a training step; none if the time is over before.
        """
        budget = seconds / (2 * FEWEST_TURNS)
        found: list[list[tuple[float, float]]] = [[], []]
        for turn in range(FEWEST_TURNS):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                key = f"tune/{candidate.name}/{turn}/{which}"
                if self.workers.broadcast(key, lambda: time.monotonic() > self.ends):
                    return []
                variables = self.environment | (candidate.environment if which else {})
                launched = self.workers.launch(time_in_one_launch, self.model, self.ddp, budget, environment=variables)
                found[which].append(launched)
        if not self.workers.is_leader:
            return []
        without, with_it = ([list(column) for column in zip(*launches, strict=True)] for launches in found)
        return [compare_settings(*pair, self.candidates) for pair in zip(without, with_it, strict=True)]

    def _judged(self, candidate: TuningCandidate, decisions: list[SpeedTest]) -> TuningTrial:
        """Return the trial; the candidate is taken if all decisions favour it.

        The figures are those of the last decision (training step).
        """
        verdict: TrialVerdict = "no change"
        if all(decision.change for decision in decisions):
            allowed = self.may_change_numbers or not candidate.may_change_numbers(self.workers.world)
            verdict = "taken" if allowed else "may change numbers"
        step = decisions[-1]
        return TuningTrial(candidate.name, verdict, step.gain, step.low, step.high, step.turns, step.unseen)
