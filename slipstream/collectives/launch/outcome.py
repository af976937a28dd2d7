"""How a launch ended on each rank, and what that says about the whole: who is to blame when nobody can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import Interrupted, UserError

#: "refused": a user's mistake; "failed": a bug; "died": the process ended without a word; "silent": it neither went on
#: nor ended; "lost": another rank was gone or did not answer. The worst explains the others.
Ending = Literal["done", "refused", "failed", "died", "silent", "lost"]
WORST: tuple[Ending, ...] = ("refused", "failed", "died", "silent", "lost")


@dataclass(frozen=True)
class Outcome:
    """A rank's ending, why (in words), and what it was doing."""

    kind: Ending
    why: str = ""
    during: str = ""


def raise_if_failed(outcomes: Mapping[int, Outcome], timeout: float) -> None:
    """Raise what the worst of the outcomes means, the same on all ranks: ``UserError`` for a refusal, ``Interrupted``
    naming the ranks that died or did not answer, ``RuntimeError`` for a bug."""
    for kind in WORST:
        found = [rank for rank, outcome in outcomes.items() if outcome.kind == kind]
        if not found:
            continue
        first = outcomes[found[0]]
        if kind == "refused":
            raise UserError(first.why)
        if kind == "failed":
            raise RuntimeError(f"rank {found[0]} failed during {first.during}: {first.why}")
        if kind == "died":
            raise Interrupted(f"{named(found)} died ({first.why}) during {first.during}")
        if kind == "silent":
            raise Interrupted(f"{named(found)} did not go on within {timeout:g} s, during {first.during}")
        raise Interrupted(f"{named(found)} lost the connection during {first.during}: {first.why}")


def named(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 1, 3``"""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
