"""What can be set about the measurement of the interconnect."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal, get_args

from pydantic import Field

from tasks.settings import Settings, settings

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@settings
class CollectivesConfig(Settings):
    """Which collectives are measured, from which size to which."""

    section = "collectives"

    operations: list[Operation] = field(default_factory=lambda: list(OPERATIONS))
    """The collectives to measure, each once."""
    smallest: Annotated[int, Field(ge=64)] = 1 << 10
    """The first size, in bytes."""
    largest: Annotated[int, Field(ge=64)] = 16 << 20
    """The last size, in bytes."""
    factor: Annotated[int, Field(ge=2)] = 4
    """The factor between one size and the next."""
    budget: Annotated[float, Field(gt=0)] = 0.1
    """Seconds for each collective at each size."""

    def check(self) -> None:
        if self.largest < self.smallest:
            raise self.reject("largest", f"at least collectives.smallest ({self.smallest})")
        if not self.operations or len(set(self.operations)) < len(self.operations):
            raise self.reject("operations", f"some of {', '.join(OPERATIONS)}, each once")

    @property
    def sizes(self) -> list[int]:
        """The sizes to measure, in bytes; the largest is always one of them."""
        sizes, size = [], self.smallest
        while size < self.largest:
            sizes.append(size)
            size *= self.factor
        return [*sizes, self.largest]
