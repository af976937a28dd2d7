"""What can be set about the measurement of the interconnect."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.settings import Settings, setting

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True)
class CollectivesConfig(Settings):
    """Which collectives are measured, from which size to which."""

    section = "collectives"

    operations: list[str] = setting(list(OPERATIONS), choices=OPERATIONS)
    #: Bytes, doubled (or more) from the smallest to the largest.
    smallest: int = setting(1 << 10, at_least=64)
    largest: int = setting(16 << 20, at_least=64)
    #: The factor between one size and the next.
    factor: int = setting(4, at_least=2)
    #: Seconds for each operation at each size.
    budget: float = setting(0.1, above=0)

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
