"""Decision whether a model may go into service, and its outcome, for the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromotionRequest:
    """Model to promote: the addresses of the exported model, of its prepared data, and of the registry."""

    exported: str
    prepared: str
    registry: str


@dataclass(frozen=True)
class PromotionDecision:
    """Decision whether a model may replace the one in service.

    ``number`` is the number of its promotion if no other run promotes a model first.
    """

    passed: bool
    number: int
    why: str


@dataclass(frozen=True)
class Promotion:
    """Outcome of promoting a model to the registry at ``registry``.

    ``version`` is the model's own, "" if it was not stored.
    """

    promoted: bool
    registry: str
    version: str
    why: str
