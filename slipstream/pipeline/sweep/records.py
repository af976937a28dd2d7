"""Immutable records of a sweep, each written once under a unique number.

A trial has a record of settings, then reports at rungs, then its end. Every record contains a digest of its content. A
truncated or changed record is ignored and blocks no later one. If a trial has several ends or reports for a rung, the
first counts, so a worker thought dead cannot change its successor's records.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.pipeline.sweep.space import SearchedParameter, values_objection
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.records import decode_record, to_tree

State = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True)
class CurvePoint:
    """Evaluation after ``progress`` thousandths of an epoch.

    ``best`` is the smallest validation loss so far.
    """

    progress: int
    loss: float
    best: float


@dataclass(frozen=True)
class TrialProposed:
    """Start of a trial with ``values`` by setting path; {} for the unchanged configuration."""

    values: dict[str, Any]


@dataclass(frozen=True)
class RungReported:
    """Report of a trial at a rung: its smallest loss so far, and whether it stops."""

    progress: int
    best: float
    stops: bool


@dataclass(frozen=True)
class TrialDied:
    """Unexpected end of a trial's process, by a signal or without a result.

    ``step`` is the step of its newest checkpoint.
    """

    step: int
    how: str


@dataclass(frozen=True)
class TrialEnded:
    """End of a trial.

    ``loss`` is its smallest validation loss; None if it failed for the given ``reason``. ``weights`` is the SHA-256 of
    a complete trial's weights. ``seconds`` is the duration of its last attempt.
    """

    state: State
    loss: float | None = None
    curve: list[CurvePoint] = field(default_factory=list)
    seconds: float = 0.0
    weights: str = ""
    reason: str = ""

    @property
    def has_its_fields(self) -> bool:
        """True if all fields that ``state`` requires are set."""
        if self.state == "failed":
            return bool(self.reason)
        measured = self.loss is not None and math.isfinite(self.loss)
        return measured and (self.state == "pruned" or bool(self.weights))


@dataclass(frozen=True)
class SweepIdentity:
    """Inputs and settings that all trials of a store share."""

    #: Fingerprint of the prepared data.
    data: str
    #: Settings of the unchanged configuration, the search space, and the seed of the sampler.
    model: dict[str, Any]
    training: dict[str, Any]
    space: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class ExecutionStarted:
    """Start of an execution, ``at`` seconds since 1970.

    All its workers and attempts count ``sweep.minutes`` from ``at``.
    """

    execution: str
    at: float


Record = TrialProposed | RungReported | TrialDied | TrialEnded | SweepIdentity | ExecutionStarted
#: Record types by the ``kind`` that is stored; stores of earlier versions contain these words.
KINDS: dict[str, type[Record]] = {
    "proposed": TrialProposed,
    "reported": RungReported,
    "died": TrialDied,
    "ended": TrialEnded,
    "identity": SweepIdentity,
    "started": ExecutionStarted,
}


@dataclass(frozen=True)
class SealedRecord:
    """Record as stored, with the digest of its content; older ones have no ``nonce``."""

    kind: str
    record: dict[str, Any]
    sha256: str
    nonce: str | None = None


@dataclass(frozen=True)
class TrialHistory:
    """Trial assembled from its records."""

    number: int
    values: dict[str, Any]
    reports: tuple[RungReported, ...] = ()
    deaths: tuple[TrialDied, ...] = ()
    ended: TrialEnded | None = None


def record_digest(tree: object) -> str:
    return hashlib.sha256(canonical_json(tree)).hexdigest()


def encode_record(record: Record) -> bytes:
    """Return a record's bytes for :func:`decode_sweep_record`, unique by a nonce.

    Otherwise two concurrent writers of equal records would both conclude that they were first.
    """
    kind = next(name for name, each in KINDS.items() if each is type(record))
    body = {"kind": kind, "record": to_tree(record), "nonce": uuid.uuid4().hex}
    return canonical_json({**body, "sha256": record_digest(body)})


def decode_sweep_record(content: bytes) -> Record | None:
    """Return the record; None if the bytes were changed or are of another version."""
    sealed = decode_record(content, SealedRecord)
    if sealed is None or sealed.kind not in KINDS:
        return None
    body = {name: value for name, value in vars(sealed).items() if name != "sha256" and value is not None}
    return (
        decode_record(canonical_json(sealed.record), KINDS[sealed.kind])
        if sealed.sha256 == record_digest(body)
        else None
    )


def assemble_trials(
    found: Mapping[int, Sequence[Record]], parameters: Sequence[SearchedParameter]
) -> tuple[list[TrialHistory], dict[int, str]]:
    """Return the trials, and the reasons for ignored proposals, by trial number.

    ``found`` holds the records of every number, in order. Only the first proposal of a number counts, and only if it
    sets exactly the ``parameters`` to values that can be drawn. The first proposal without values is the unchanged
    configuration.
    """
    trials: list[TrialHistory] = []
    ignored: dict[int, str] = {}
    for number in sorted(found):
        values = next((record.values for record in found[number] if isinstance(record, TrialProposed)), None)
        if values is None:
            continue
        given = unchanged_trial(trials)
        if values:
            why = values_objection(values, parameters)
        else:
            why = f"sets no settings, like trial {given.number}" if given else ""
        if why:
            ignored[number] = why
        else:
            trials.append(trial_of(number, values, found[number]))
    return trials, ignored


def trial_of(number: int, values: dict[str, Any], records: Sequence[Record]) -> TrialHistory:
    """Return the trial with these ``values``.

    End records that lack a required field are ignored.
    """
    reports: dict[int, RungReported] = {}
    for record in records:
        if isinstance(record, RungReported):
            reports.setdefault(record.progress, record)
    return TrialHistory(
        number,
        values,
        tuple(reports[progress] for progress in sorted(reports)),
        tuple(record for record in records if isinstance(record, TrialDied)),
        next((record for record in records if isinstance(record, TrialEnded) and record.has_its_fields), None),
    )


def unchanged_trial(trials: Sequence[TrialHistory]) -> TrialHistory | None:
    """Return the trial of the unchanged configuration; None before it is proposed."""
    return next((trial for trial in trials if not trial.values), None)
