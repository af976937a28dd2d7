"""The files in a home, and which checkpoints are retained.

``step-000000001200.a0003/`` is one checkpoint: step 1200, written by attempt 3. It is complete once its
``manifest.json`` exists, which is written last; a name is never used twice. ``claims/0003`` says who the third attempt
is; from then on the second may finish the save that it has announced and begins no other. ``inherited/0003.json`` lists
the checkpoints that the third attempt found then; of those of earlier attempts only these count. ``leases/0003.json``
is the sign of life of the third attempt. ``finished.json`` says where the trained model lies. ``latest.json`` is for
people and other programs; a restore uses manifests only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.artifacts.format import MANIFEST

LATEST = "latest.json"
FINISHED = "finished.json"
CLAIMS = "claims/"
INHERITED = "inherited/"
LEASES = "leases/"
CHECKPOINTS = "step-"
PATTERN = re.compile(r"step-(\d{12})\.a(\d{4,})(\.best)?")


@dataclass(frozen=True, order=True)
class Name:
    """The name of a checkpoint. Names are ordered by age: a later attempt's is newer, whatever its step."""

    attempt: int
    step: int
    best: bool = False

    def __str__(self) -> str:
        return f"step-{self.step:012d}.a{self.attempt:04d}{'.best' if self.best else ''}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        found = PATTERN.fullmatch(text)
        return cls(int(found[2]), int(found[1]), bool(found[3])) if found else None


@dataclass(frozen=True)
class Retention:
    """The checkpoints to retain: the newest ``last``, the newest marked best, those of every ``every``-th step, and the
    newest of a ``regular``-th step (0: none)."""

    last: int = 2
    every: int = 0
    regular: int = 0

    def expired(self, names: Iterable[Name]) -> list[Name]:
        """Those of ``names`` to delete, newest first."""
        newest_first = sorted(names, reverse=True)
        retained = set(newest_first[: self.last])
        retained.update([name for name in newest_first if name.best][:1])
        if self.regular:
            retained.update([name for name in newest_first if name.step % self.regular == 0][:1])
        if self.every:
            retained.update(name for name in newest_first if name.step % self.every == 0)
        return [name for name in newest_first if name not in retained]


def complete(keys: Iterable[str]) -> list[Name]:
    """The checkpoints that have a manifest among a store's ``keys``, newest first."""
    directories = [key.removesuffix("/" + MANIFEST) for key in keys if key.endswith("/" + MANIFEST)]
    return sorted((name for name in map(Name.parse, directories) if name), reverse=True)


def number_of(key: str, prefix: str) -> int:
    """The attempt that a key below ``prefix`` is of; 0 if it is of none."""
    digits = key.removeprefix(prefix).removesuffix(".json")
    return int(digits) if key.startswith(prefix) and digits.isdigit() else 0


def newest(keys: Iterable[str], prefix: str = CLAIMS) -> int:
    """The highest attempt among the ``keys`` below ``prefix``; 0 if there is none."""
    return max((number_of(key, prefix) for key in keys), default=0)


def claim_key(attempt: int) -> str:
    return f"{CLAIMS}{attempt:04d}"


def inherited_key(attempt: int) -> str:
    return f"{INHERITED}{attempt:04d}.json"


def lease_key(attempt: int) -> str:
    return f"{LEASES}{attempt:04d}.json"
