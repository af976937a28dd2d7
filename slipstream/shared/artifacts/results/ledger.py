"""Ledger of a training: steps of every attempt, how many were useful, and how time was spent.

Rank 0 writes one record per attempt, ``ledger/<attempt>.json`` in the checkpoint directory
(:mod:`slipstream.pipeline.train.fault_tolerance.goodput`). If another rank ended the attempt, it writes
``ledger/<attempt>.end.json``, which overrides rank 0's ``ended``.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.shared.artifacts.format import Artifact, canonical_json
from slipstream.shared.artifacts.records import decode_record
from slipstream.shared.artifacts.results.devices import LATEST, AttemptLosses, AttemptSpan, TrainingDevices
from slipstream.shared.artifacts.results.training import (
    KIND,
    Goodput,
    ProcessGroupFigures,
    Throughput,
    read_attempt,
    read_devices,
    read_history,
)
from slipstream.shared.logs import logger
from slipstream.shared.storage import Storage

PREFIX = "ledger/"
#: Suffix of :class:`AttemptEnd` files.
END_FILE = ".end.json"
#: Activities that are timed; the remaining wall-clock time is idle or unaccounted for.
START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL = "start", "restore", "steps", "evaluation", "data_wait", "stall"
ACTIVITIES = (START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL)
#: Value of ``ended`` for an attempt that recorded no end.
KILLED = "killed, or its machine was lost"
#: Name of a GPU that no record names.
UNKNOWN_GPU = "an unknown GPU"

LOG = logger("goodput")


@dataclass
class AttemptRecord:
    """Record of one attempt.

    ``first_step`` and ``last_step`` are the numbers of finished optimiser steps at the attempt's start and at the
    record's last update.
    """

    attempt: int
    world: int
    first_step: int = 0
    last_step: int = 0
    #: Step of the last published checkpoint, and number of checkpoints published.
    saved_step: int = 0
    saves: int = 0
    #: Seconds by activity.
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    #: Wall-clock seconds since the attempt started.
    wall: float = 0.0
    ended: str = KILLED
    #: Start in seconds since 1970, UTC; 0 in older records.
    began_at: float = 0.0
    #: Seconds from the start of rank 0's pod to ``began_at``, which are paid for, too.
    before: float = 0.0
    #: Rank 0's machine and device, and whether it is a spot machine; "" or None if unknown.
    node: str = ""
    device: str = ""
    spot: bool | None = None
    #: Number of pods or machines.
    pods: int = 1
    #: Times in seconds since its start at which evaluations and checkpoints ended, by :data:`EVENTS`.
    events: dict[str, list[float]] = field(default_factory=dict)
    #: :class:`.AttemptLosses` as JSON; None before the first step.
    observed: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible times and counts, so that sums over attempts stay finite."""
        times = (self.wall, self.began_at, self.before, *(at for each in self.events.values() for at in each))
        counts = (self.attempt, self.world, self.first_step, self.last_step, self.saved_step, self.saves, self.pods)
        if not all(0 <= at < LATEST for at in times) or not all(abs(at) < LATEST for at in self.seconds.values()):
            raise ValueError("expected seconds")
        if not all(0 <= count < LATEST for count in counts):
            raise ValueError("expected counts of at least 0")

    @property
    def executed(self) -> int:
        return self.last_step - self.first_step


@dataclass(frozen=True)
class AttemptEnd:
    """Contents of an ``.end.json`` file: reason of the attempt's end, from the rank that ended it."""

    ended: str


def summarise_goodput(attempts: Sequence[AttemptRecord]) -> Goodput:
    """Return the goodput over all attempts of a run, without steps that a later attempt repeated."""
    ordered = sorted((dataclasses.replace(record) for record in attempts), key=lambda record: record.attempt)
    for record, following in pairwise(ordered):
        # The record of a killed attempt is seconds old, but the attempt got at least to where the next one resumed.
        record.last_step = max(record.last_step, following.first_step)
    useful = useful_steps(ordered)
    kept, lost = sum(useful), sum(lost_of(record, its) for record, its in zip(ordered, useful, strict=True))
    executed, wall = sum(record.executed for record in ordered), sum(record.wall for record in ordered)
    seconds = {name: sum(record.seconds[name] for record in ordered) for name in ACTIVITIES}
    return Goodput(
        attempts=len(ordered),
        executed=executed,
        kept=kept,
        seconds=seconds,
        lost=lost,
        wall=wall,
        ends=tuple(record.ended for record in ordered),
        useful_steps=kept / executed if executed else 1.0,
        goodput=max(0.0, seconds[STEPS] - lost) / wall if wall else 1.0,
        saves=sum(record.saves for record in ordered),
    )


def useful_steps(ordered: Sequence[AttemptRecord]) -> list[int]:
    """Return the number of useful steps of every attempt; ``ordered`` has the oldest first.

    A step is useful if it precedes the first step of every later attempt.
    """
    useful = []
    for index, record in enumerate(ordered):
        repeated_from = min([later.first_step for later in ordered[index + 1 :]], default=record.last_step)
        useful.append(max(0, min(record.last_step, repeated_from) - record.first_step))
    return useful


def lost_of(record: AttemptRecord, useful: int) -> float:
    """Return the seconds of all but ``useful`` steps of an attempt, assuming equal step times."""
    return record.seconds[STEPS] * (record.executed - useful) / record.executed if record.executed else 0.0


def lost_seconds(ordered: Sequence[AttemptRecord]) -> list[float]:
    """Return the seconds of every attempt's repeated steps; ``ordered`` has the oldest first."""
    return [lost_of(record, useful) for record, useful in zip(ordered, useful_steps(ordered), strict=True)]


def record_key(attempt: int) -> str:
    return f"{PREFIX}{attempt:04d}.json"


def end_key(attempt: int) -> str:
    return f"{PREFIX}{attempt:04d}{END_FILE}"


def read_attempts(storage: Storage) -> list[AttemptRecord]:
    """Return the records of all attempts in a checkpoint directory, oldest first.

    Damaged records are skipped with a warning.
    """
    records, ends = list[AttemptRecord](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="ledger-") as temporary:
        for key in storage.list(PREFIX):
            content = storage.get(key, Path(temporary)).read_bytes()
            is_end = key.endswith(END_FILE)
            if is_end and (end := decode_record(content, AttemptEnd, extra="ignore")):
                ends[key] = end.ended
            elif not is_end and (record := decode_attempt(content)):
                records.append(record)
            else:
                LOG.warning("%s/%s is not a record of an attempt and is skipped", storage.base, key)
    for record in records:
        record.ended = ends.get(end_key(record.attempt), record.ended)
    return sorted(records, key=lambda record: record.attempt)


def decode_attempt(content: bytes) -> AttemptRecord | None:
    """Parse an attempt's record of any version of this project; return None if it is damaged.

    Unknown fields and activities are skipped; missing ones get defaults.
    """
    record = decode_record(content, AttemptRecord, extra="ignore")
    if record is None:
        return None
    return dataclasses.replace(record, seconds={name: record.seconds.get(name, 0.0) for name in ACTIVITIES})


def observed_in(attempts: Sequence[AttemptRecord]) -> list[AttemptLosses]:
    """Return the measurements of all attempts except those in a later version's format."""
    trees = (attempt.observed for attempt in attempts if attempt.observed is not None)
    decoded = (decode_record(canonical_json(tree), AttemptLosses) for tree in trees)
    return [observed for observed in decoded if observed is not None]


@dataclass(frozen=True)
class TrainingFigures:
    """Measurements of a training over all attempts."""

    world: ProcessGroupFigures
    #: Driver's name of its GPUs, :data:`UNKNOWN_GPU`, or "" on CPUs; and number of pods per attempt.
    gpu: str
    pods: int
    parameters: int
    #: Rows per global batch.
    batch_size: int
    ledger: Goodput
    #: None if the last attempt executed no step.
    throughput: Throughput | None
    #: Seconds from snapshot to publication of the last checkpoint.
    save_seconds: float
    attempts: list[AttemptSpan]
    #: Number of trained parameters; None in older trainings, which trained all.
    trained: int | None = None
    #: Code versions of the stage train, in order; empty if unknown.
    code_versions: list[str] = field(default_factory=list)
    #: :attr:`.History.ended`.
    ended: str = ""

    @property
    def frozen(self) -> int:
        return 0 if self.trained is None else self.parameters - self.trained


def read_figures(directory: Path) -> TrainingFigures:
    """Return the measurements of a trained model. Raises ``DamagedArtifact`` if it is incomplete."""
    history, attempt, devices = read_history(directory), read_attempt(directory), read_devices(directory)
    training = Artifact.open(directory, KIND).made_by.get("training")
    batch_size = training.get("batch_size", 0) if isinstance(training, dict) else 0
    devices = devices or TrainingDevices([], [])
    last = max((pod.attempt for pod in devices.pods), default=0)
    return TrainingFigures(
        world=history.world,
        gpu=gpu_name(attempt.device, attempt.throughput) if history.world.device != "cpu" else "",
        pods=max(1, sum(pod.attempt == last for pod in devices.pods)),
        parameters=history.parameters,
        trained=history.trained,
        batch_size=batch_size,
        ledger=attempt.ledger,
        throughput=attempt.throughput,
        save_seconds=attempt.save_seconds,
        attempts=devices.attempts,
        code_versions=attempt.code_versions,
        ended=history.ended,
    )


def gpu_name(device: str, speed: Throughput | None) -> str:
    """Return ``device``; if it is "" (older records), the name in ``speed.peak_from``, else :data:`UNKNOWN_GPU`."""
    return device or (speed.peak_from.partition("the data sheet of ")[2] if speed else "") or UNKNOWN_GPU
