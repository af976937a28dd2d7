"""The files below the home of a run's checkpoints, and which checkpoints are retained.

``step-000000001200.a0003/`` is one checkpoint: step 1200, written by attempt 3. It is complete once its
``manifest.json`` exists, which is written last; a name is never used twice. ``attempts/0003`` marks the start of the
third attempt, after which the second may no longer publish. ``latest.json`` is for people and other programs; a restore
uses manifests only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tasks.artifacts.format import MANIFEST

LATEST = "latest.json"
ATTEMPTS = "attempts/"
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


def unfinished(keys: Sequence[str], before: int) -> list[str]:
    """The keys of incomplete checkpoints of attempts earlier than ``before``."""
    finished = {str(name) for name in complete(keys)}
    left = []
    for key in keys:
        directory = key.partition("/")[0]
        name = Name.parse(directory)
        if name and name.attempt < before and directory not in finished:
            left.append(key)
    return left


def newest_attempt(keys: Iterable[str]) -> int:
    """The number of the last attempt that was started; 0 before the first."""
    numbers = [key.removeprefix(ATTEMPTS) for key in keys if key.startswith(ATTEMPTS)]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def attempt_key(attempt: int) -> str:
    return f"{ATTEMPTS}{attempt:04d}"
