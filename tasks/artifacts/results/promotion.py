"""Whether a model may go into service, and whether it did: what promotion hands to the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contest:
    """The addresses of an exported model, of the data that it was exported with, and of the registry."""

    exported: str
    prepared: str
    registry: str


@dataclass(frozen=True)
class Verdict:
    """A model against the one in service: whether it may take its place, and why. ``number`` is that of the promotion
    that it would be, if nobody promotes another one before."""

    passed: bool
    number: int
    why: str


@dataclass(frozen=True)
class Promotion:
    """What became of a model in the registry at ``registry``; ``version`` is its own, "" if it was not stored."""

    promoted: bool
    registry: str
    version: str
    why: str
