"""Training plan of a profile that ``slipstream plan`` wrote: its table ``[plan]``, for the run's report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from slipstream.shared.errors import UserError
from slipstream.shared.settings import LARGEST_EXACT, Settings, settings

#: Number of percentiles of simulated trainings that describe an amount: the 5th, the 50th and the 95th.
QUANTILES = 3


@settings
class Planned(Settings):
    """Plan of one training, from its first attempt to its end, including the waits for capacity between attempts."""

    section = "profile.plan"

    take: str
    """Chosen instance and capacity type."""
    rows: Annotated[int, Field(ge=1, le=LARGEST_EXACT)]
    """Number of training rows, over all epochs."""
    hours: list[float]
    dollars: list[float]
    interruptions: float

    def check(self) -> None:
        for name in ("hours", "dollars"):
            self._check_quantiles(name, getattr(self, name))
        if self.interruptions < 0:
            raise self.reject("interruptions", "a mean of at least 0")

    def _check_quantiles(self, name: str, values: Sequence[float]) -> None:
        rising = all(low <= high for low, high in pairwise([0.0, *values]))
        if len(values) != QUANTILES or not rising or not all(map(math.isfinite, values)):
            raise self.reject(name, "three rising numbers of at least 0: the 5th, 50th and 95th percentiles")


def planned_from(table: object) -> Planned | None:
    """Parse a profile's plan table, or return None without a table; raises ``UserError`` naming the wrong setting."""
    if table is None:
        return None
    if not isinstance(table, dict):
        raise UserError("profile.plan: expected a table, as slipstream plan --write writes it")
    return Planned.from_dict(table)
