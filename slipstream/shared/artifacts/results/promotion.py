"""Decision and outcome of a promotion of a model to production, for the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromotionRequest:
    """Addresses of the exported model to promote, of its prepared data, and of the registry."""

    exported: str
    prepared: str
    registry: str


@dataclass(frozen=True)
class PromotionDecision:
    """Decision whether a model may replace the model in production.

    ``number`` is the promotion's number unless another run promotes a model first.
    """

    passed: bool
    number: int
    why: str


@dataclass(frozen=True)
class Promotion:
    """Outcome of promoting a model to the registry at ``registry``.

    ``version`` is the model's version in the registry, or "" if it was not stored.
    """

    promoted: bool
    registry: str
    version: str
    why: str
