"""Ledger of a training: the steps of every attempt, how many of them were kept, and where the time went.

Every attempt has one record, ``ledger/<attempt>.json`` in the checkpoint directory, which rank 0 writes
(:mod:`slipstream.train.fault_tolerance.goodput`). Another rank that ended the attempt writes
``ledger/<attempt>.end.json``, which overrides rank 0's account of the end. Steps are useful if no later attempt
repeated them. Records concern time only and do not affect results.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.artifacts.format import canonical_json
from slipstream.artifacts.records import decode_record
from slipstream.artifacts.results.bottleneck import Observed
from slipstream.artifacts.results.devices import LATEST
from slipstream.artifacts.results.training import Goodput
from slipstream.logs import logger
from slipstream.storage import Storage

PREFIX = "ledger/"
#: Suffix of the record of an attempt's end.
END_FILE = ".end.json"
#: Activities that an attempt spends time on; the rest of the wall-clock time is idle or unaccounted for.
START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL = "start", "restore", "steps", "evaluation", "data_wait", "stall"
ACTIVITIES = (START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL)
#: The end of an attempt that recorded none.
KILLED = "killed, or its machine was lost"

LOG = logger("goodput")


@dataclass
class AttemptRecord:
    """Record of one attempt.

    ``first_step`` and ``last_step`` count the finished steps at its start and now.
    """

    attempt: int
    world: int
    first_step: int = 0
    last_step: int = 0
    #: Step of the last published checkpoint, and the number of published checkpoints.
    saved_step: int = 0
    saves: int = 0
    #: Seconds by activity.
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))
    #: Wall-clock seconds since the start of the attempt.
    wall: float = 0.0
    ended: str = KILLED
    #: Start in seconds since 1970, UTC; 0 in older records.
    began_at: float = 0.0
    #: Rank 0's machine and device, and whether the machine may be preempted; None if unknown.
    node: str = ""
    device: str = ""
    spot: bool | None = None
    #: Number of machines or pods of its processes.
    pods: int = 1
    #: Seconds since its start at which an evaluation or a checkpoint ended, by :data:`EVENTS`.
    events: dict[str, list[float]] = field(default_factory=dict)
    #: :class:`.Observed` as a tree; None before the first step.
    observed: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible times and counts, so that sums over attempts stay finite."""
        times = (self.wall, self.began_at, *(at for each in self.events.values() for at in each))
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
    """End of an attempt, recorded by the rank that caused it; the key names the attempt."""

    ended: str


def summarise(attempts: Sequence[AttemptRecord]) -> Goodput:
    """Add up the records of all attempts of a run. Steps that a later attempt repeated are not kept."""
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
    """Return the steps of every attempt, oldest first, that no later one repeated.

    Those are the steps before the earliest start of any later attempt.
    """
    useful = []
    for index, record in enumerate(ordered):
        repeated_from = min([later.first_step for later in ordered[index + 1 :]], default=record.last_step)
        useful.append(max(0, min(record.last_step, repeated_from) - record.first_step))
    return useful


def lost_of(record: AttemptRecord, useful: int) -> float:
    """Return the seconds of an attempt's steps that are not among its ``useful`` ones."""
    return record.seconds[STEPS] * (record.executed - useful) / record.executed if record.executed else 0.0


def lost_seconds(ordered: Sequence[AttemptRecord]) -> list[float]:
    """Return the seconds of repeated steps of every attempt, oldest first."""
    return [lost_of(record, useful) for record, useful in zip(ordered, useful_steps(ordered), strict=True)]


def record_key(attempt: int) -> str:
    return f"{PREFIX}{attempt:04d}.json"


def end_key(attempt: int) -> str:
    return f"{PREFIX}{attempt:04d}{END_FILE}"


def read_attempts(storage: Storage) -> list[AttemptRecord]:
    """Return the records of all attempts in a checkpoint directory, oldest first.

    Unreadable records are skipped with a warning.
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
    """Return the record in ``content``, of any version of this project, or None if it is damaged.

    Fields and activities of a later version are skipped; those that an earlier one lacks get their defaults.
    """
    record = decode_record(content, AttemptRecord, extra="ignore")
    if record is None:
        return None
    return dataclasses.replace(record, seconds={name: record.seconds.get(name, 0.0) for name in ACTIVITIES})


def observed_in(attempts: Sequence[AttemptRecord]) -> list[Observed]:
    """Return the measurements of the attempts, without those that a later version records in another form."""
    trees = (attempt.observed for attempt in attempts if attempt.observed is not None)
    decoded = (decode_record(canonical_json(tree), Observed) for tree in trees)
    return [observed for observed in decoded if observed is not None]
