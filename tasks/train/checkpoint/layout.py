"""How checkpoints lie in their home, and which of them stay.

``step-000000001200.a0003/`` holds one checkpoint: step 1200, written by attempt 3. It is whole once its
``manifest.json`` is there, which is written last; a name is never used twice. ``attempts/0003`` says that a third
attempt began: from then on the second may no longer publish. ``latest.json`` is for people and other programs; a
restore believes manifests only.
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
    """Which checkpoint it is. In order of age: a later attempt's is newer, whatever its step."""

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
class Keep:
    """Which checkpoints stay: the last ``last``, the newest marked best, and every ``every``-th step (0: none)."""

    last: int = 2
    every: int = 0

    def dropped(self, names: Iterable[Name]) -> list[Name]:
        newest_first = sorted(names, reverse=True)
        stay = set(newest_first[: self.last])
        stay.update([name for name in newest_first if name.best][:1])
        if self.every:
            stay.update(name for name in newest_first if name.step % self.every == 0)
        return [name for name in newest_first if name not in stay]


def whole(keys: Iterable[str]) -> list[Name]:
    """The checkpoints among a store's keys that have a manifest, newest first."""
    directories = [key.removesuffix("/" + MANIFEST) for key in keys if key.endswith("/" + MANIFEST)]
    return sorted((name for name in map(Name.parse, directories) if name), reverse=True)


def unfinished(keys: Sequence[str], before: int) -> list[str]:
    """Keys of checkpoints without a manifest that an attempt earlier than ``before`` left behind."""
    done = {str(name) for name in whole(keys)}
    left = []
    for key in keys:
        directory = key.partition("/")[0]
        name = Name.parse(directory)
        if name and name.attempt < before and directory not in done:
            left.append(key)
    return left


def newest_attempt(keys: Iterable[str]) -> int:
    """The number of the last attempt that began here; 0 before the first."""
    numbers = [key.removeprefix(ATTEMPTS) for key in keys if key.startswith(ATTEMPTS)]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def attempt_key(attempt: int) -> str:
    return f"{ATTEMPTS}{attempt:04d}"
