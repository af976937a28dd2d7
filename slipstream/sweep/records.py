"""What is written down of a sweep: immutable records, each put once under a number that nobody else has.

Of a trial these are first its settings, then what it reported where its end was decided on, then how it ended. A record
carries a digest of itself: one that is cut or changed neither counts nor stands in the way, as the next one has another
number. Of two that say the same thing the first counts, so that a worker that was thought dead changes nothing that its
successor wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.artifacts.format import DamagedArtifact, canonical_json
from slipstream.artifacts.records import from_tree, to_tree
from slipstream.sweep.space import Parameter, objection

State = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True)
class Point:
    """An evaluation: after ``progress`` thousandths of an epoch, and the smallest validation loss up to there."""

    progress: int
    loss: float
    best: float


@dataclass(frozen=True)
class Proposed:
    """The trial has begun: values of the space by their paths; none for the configuration as given."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Reported:
    """The trial came to a rung with this smallest loss, and heard whether it stops there."""

    progress: int
    best: float
    stops: bool


@dataclass(frozen=True)
class Died:
    """Its process was killed, or ended without a word, when its newest checkpoint was of this step."""

    step: int
    how: str


@dataclass(frozen=True)
class Ended:
    """How it ended. ``loss`` is its smallest validation loss, None if it failed, with the ``reason``. ``weights`` is
    the SHA-256 of the trained weights of a trial that is complete. ``seconds`` are those of all its attempts that
    ended by themselves."""

    state: State
    loss: float | None = None
    curve: list[Point] = field(default_factory=list)
    seconds: float = 0.0
    weights: str = ""
    reason: str = ""

    @property
    def has_its_fields(self) -> bool:
        """Return True if no field of its state is missing."""
        if self.state == "failed":
            return bool(self.reason)
        measured = self.loss is not None and math.isfinite(self.loss)
        return measured and (self.state == "pruned" or bool(self.weights))


@dataclass(frozen=True)
class Identity:
    """What all trials of a store have in common."""

    #: Fingerprint of the prepared data.
    data: str
    #: The settings that decide what is trained as given, which are searched, and the seed of the search.
    model: dict[str, Any]
    training: dict[str, Any]
    space: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class Started:
    """An execution has begun, at ``at`` in seconds since 1970: ``sweep.minutes`` are counted from there, by all its
    workers and attempts."""

    execution: str
    at: float


Record = Proposed | Reported | Died | Ended | Identity | Started
KINDS: dict[str, type[Record]] = {
    kind.__name__.lower(): kind for kind in (Proposed, Reported, Died, Ended, Identity, Started)
}


@dataclass(frozen=True)
class Trial:
    """A trial as its records say."""

    number: int
    values: dict[str, Any]
    reports: tuple[Reported, ...] = ()
    deaths: tuple[Died, ...] = ()
    ended: Ended | None = None


def digest(tree: object) -> str:
    return hashlib.sha256(canonical_json(tree)).hexdigest()


def encode(record: Record) -> bytes:
    """The bytes of a record, which :func:`decode` takes. They are like no others: two workers that write the same at
    once must not both find their own bytes in the store and believe to be the first."""
    body = {"kind": type(record).__name__.lower(), "record": to_tree(record), "nonce": uuid.uuid4().hex}
    return canonical_json({**body, "sha256": digest(body)})


def decode(content: bytes) -> Record | None:
    """The record; None if these bytes are not as they were written."""
    try:
        tree = json.loads(content)
        said = tree.pop("sha256")
        kind = KINDS[tree["kind"]]
        return from_tree(tree["record"], kind, "record") if said == digest(tree) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, DamagedArtifact):
        return None


def trials_of(
    found: Mapping[int, Sequence[Record]], parameters: Sequence[Parameter]
) -> tuple[list[Trial], dict[int, str]]:
    """Return the trials, and by number why other proposals are ignored.

    ``found`` are the records of every number, in their order. The first proposal of a number is the only one. It counts
    if it sets exactly the ``parameters`` to values that can be drawn, or nothing: the first one that sets nothing is
    the configuration as given.
    """
    trials: list[Trial] = []
    ignored: dict[int, str] = {}
    for number in sorted(found):
        values = next((record.values for record in found[number] if isinstance(record, Proposed)), None)
        if values is None:
            continue
        given = given_of(trials)
        if values:
            why = objection(values, parameters)
        else:
            why = f"sets nothing, as trial {given.number} does already" if given else ""
        if why:
            ignored[number] = why
        else:
            trials.append(trial_of(number, values, found[number]))
    return trials, ignored


def trial_of(number: int, values: dict[str, Any], records: Sequence[Record]) -> Trial:
    """Return the trial with these ``values``; an end record that lacks a field of its state does not count."""
    reports: dict[int, Reported] = {}
    for record in records:
        if isinstance(record, Reported):
            reports.setdefault(record.progress, record)
    return Trial(
        number,
        values,
        tuple(reports[progress] for progress in sorted(reports)),
        tuple(record for record in records if isinstance(record, Died)),
        next((record for record in records if isinstance(record, Ended) and record.has_its_fields), None),
    )


def given_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial of the configuration as given, None if there is none."""
    return next((trial for trial in trials if not trial.values), None)
