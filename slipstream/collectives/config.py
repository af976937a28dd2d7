"""Settings of the interconnect benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from slipstream.settings import LARGEST, LARGEST_EXACT, Settings, settings, to_dict

Operation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_allv",
    "send_recv",
    "barrier",
]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
DataType = Literal["float32", "bfloat16", "float16", "int32", "int64"]
Reduction = Literal["sum", "avg", "max"]
Mode = Literal["loop", "barrier"]
#: Settings that affect the handling of a profile, but not its contents.
HANDLING = ("history", "reuse_days", "timeout", "compare_seconds", "tune_seconds", "numbers")


@settings
class CollectivesConfig(Settings):
    """Which collectives are measured, from which size to which."""

    section = "collectives"

    operations: list[Operation] = field(default_factory=lambda: list(OPERATIONS))
    """Collectives to measure, without repetition."""
    dtypes: list[DataType] = field(default_factory=lambda: ["float32"])
    """Data types, without repetition."""
    reductions: list[Reduction] = field(default_factory=lambda: ["sum"])
    """Reductions of all_reduce, reduce_scatter and reduce, without repetition."""
    modes: list[Mode] = field(default_factory=lambda: ["loop"])
    """Timing modes: in "loop" iterations follow one another, in "barrier" every one starts after a barrier."""
    in_place: bool = False
    """Also measure all_gather and reduce_scatter within one buffer."""
    in_flight: list[Annotated[int, Field(ge=1, le=64)]] = field(default_factory=lambda: [1])
    """Numbers of operations that are started before the first is waited for, without repetition."""
    smallest: Annotated[int, Field(ge=64, le=LARGEST_EXACT)] = 1 << 10
    """Smallest size in bytes."""
    largest: Annotated[int, Field(ge=64, le=LARGEST_EXACT)] = 16 << 20
    """Largest size in bytes."""
    factor: Annotated[int, Field(ge=2, le=LARGEST)] = 8
    """Factor between one size and the next."""
    budget: Annotated[float, Field(gt=0)] = 0.03
    """Maximum seconds per case (an operation at one size in one mode) and launch; a case ends earlier if its median is
    known to within 2 %."""
    launches: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of fresh process groups that measure everything, one after another; intervals come from their spread."""
    worlds: list[Annotated[int, Field(ge=2, le=LARGEST)]] = field(default_factory=list)
    """Smaller numbers of processes to measure as well, without repetition. The model for more processes is then fitted
    to several numbers and tested on every one. The processes are taken from the hosts in turn."""
    pairs: bool = True
    """Measure every pair of ranks, which separates a slow rank from a slow link."""
    overlap: bool = True
    """Measure how much of an all_reduce is hidden behind a matmul."""
    history: str = ".slipstream/history"
    """Directory or store address of the profiles, by hardware, versions and number of processes. In pods the default is
    below Flyte's raw output."""
    reuse_days: Annotated[float, Field(ge=0)] = 7
    """Maximum age in days of a profile that the main job takes from the history for the same hardware; 0 always
    measures."""
    timeout: Annotated[float, Field(gt=0)] = 60
    """Seconds after which a rank that has not arrived or does not continue is reported. On a cluster the benchmark is
    also skipped if some of its pods have not started after that time."""
    compare_seconds: Annotated[float, Field(gt=0)] = 120
    """Seconds after which compare adds no more launches, even if no difference is significant yet."""
    tune_seconds: Annotated[float, Field(gt=0)] = 300
    """Seconds that the tuner divides among all settings that it tries."""
    numbers: Literal["keep", "may_change"] = "keep"
    """Policy of the tuner: with "may_change" it may take settings that change the numbers of a training, such as
    compressed gradients."""

    def check(self) -> None:
        if self.largest < self.smallest:
            raise self.reject("largest", f"at least collectives.smallest ({self.smallest})")
        choices: dict[str, Sequence[object]] = {
            "operations": OPERATIONS,
            "dtypes": get_args(DataType),
            "reductions": get_args(Reduction),
            "modes": get_args(Mode),
            "in_flight": (1, 2, 4),
        }
        for name, allowed in choices.items():
            chosen = getattr(self, name)
            if not chosen or len(set(chosen)) < len(chosen):
                raise self.reject(name, f"some of {', '.join(map(str, allowed))}, each once")
        if len(set(self.worlds)) < len(self.worlds):
            raise self.reject("worlds", "each number of processes once")

    @property
    def sizes(self) -> list[int]:
        """Sizes to measure in bytes, always including the largest."""
        sizes, size = [], self.smallest
        while size < self.largest:
            sizes.append(size)
            size *= self.factor
        return [*sizes, self.largest]

    @property
    def plain(self) -> CollectivesConfig:
        """Same operations and sizes in the one form that models are fitted to."""
        one: dict[str, Any] = {"dtypes": ["float32"], "reductions": ["sum"], "modes": ["loop"], "in_flight": [1]}
        return replace(self, **one, in_place=False)

    @property
    def short(self) -> CollectivesConfig:
        """Collectives of training (DDP's and FSDP's) at every second size, for a few seconds in all."""
        training: list[Operation] = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
        return replace(self, operations=training, factor=self.factor**2)

    @property
    def is_short(self) -> bool:
        return self.measuring == CollectivesConfig().short.measuring

    @property
    def is_default(self) -> bool:
        """True if the user did not choose measurements."""
        return self.measuring == CollectivesConfig().measuring

    @property
    def measuring(self) -> dict[str, object]:
        """Settings that decide the contents of a profile."""
        return {name: value for name, value in to_dict(self).items() if name not in HANDLING}
