"""Whether a model may go into service, and whether it did: what promotion hands to the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromotionRequest:
    """Which model is to be promoted: the addresses of the exported model, of the data that it was exported with, and of
    the registry."""

    exported: str
    prepared: str
    registry: str


@dataclass(frozen=True)
class PromotionDecision:
    """Whether a model may replace the one in service, and why. ``number`` is the number that its promotion would have,
    if no other run promotes a model first."""

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
