"""Settings of the interconnect benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from slipstream.shared.settings import LARGEST, LARGEST_EXACT, Settings, settings, to_dict

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
#: Settings that do not affect the contents of a profile.
HANDLING = ("history", "reuse_days", "timeout", "compare_seconds", "tune_seconds", "numbers")


@settings
class CollectivesConfig(Settings):
    """Settings of the interconnect benchmark: operations, sizes and time limits."""

    section = "collectives"

    operations: list[Operation] = field(default_factory=lambda: list(OPERATIONS))
    """Collectives to measure, without repetition."""
    dtypes: list[DataType] = field(default_factory=lambda: ["float32"])
    """Data types, without repetition."""
    reductions: list[Reduction] = field(default_factory=lambda: ["sum"])
    """Reductions of all_reduce, reduce_scatter and reduce, without repetition."""
    modes: list[Mode] = field(default_factory=lambda: ["loop"])
    """"loop": iterations without synchronisation between them; "barrier": a barrier before every iteration."""
    in_place: bool = False
    """Also measure all_gather and reduce_scatter with input and output in the same buffer."""
    in_flight: list[Annotated[int, Field(ge=1, le=64)]] = field(default_factory=lambda: [1])
    """Numbers of operations started before the first is waited for, without repetition."""
    smallest: Annotated[int, Field(ge=64, le=LARGEST_EXACT)] = 1 << 10
    """Smallest size, in bytes."""
    largest: Annotated[int, Field(ge=64, le=LARGEST_EXACT)] = 16 << 20
    """Largest size, in bytes."""
    factor: Annotated[int, Field(ge=2, le=LARGEST)] = 8
    """Factor between successive sizes."""
    budget: Annotated[float, Field(gt=0)] = 0.03
    """Maximum seconds for each case (an operation at one size in one mode) in each launch; a case ends earlier if its
    median is known to within 2 %."""
    launches: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of launches (fresh process groups), in sequence. Each measures everything; confidence intervals come from
    the spread between launches."""
    worlds: list[Annotated[int, Field(ge=2, le=LARGEST)]] = field(default_factory=list)
    """Smaller numbers of processes to measure as well, without repetition. The model that predicts larger numbers of
    processes is then fitted to several numbers, and tested on each. Processes are taken from the hosts in turn."""
    pairs: bool = True
    """Measure every pair of ranks while the other ranks wait, to distinguish a slow rank from a slow link."""
    overlap: bool = True
    """Measure how much of an all_reduce is hidden behind a concurrent matmul."""
    history: str = ".slipstream/history"
    """Directory or store address of earlier profiles, which are kept by hardware, versions and number of processes. In
    pods the default is replaced by a directory below Flyte's raw output."""
    reuse_days: Annotated[float, Field(ge=0)] = 7
    """Maximum age in days of a profile of the same hardware that the main job reuses; 0: never reuse."""
    timeout: Annotated[float, Field(gt=0)] = 60
    """Seconds after which a rank that does not arrive or continue is named in an error. On a cluster the benchmark is
    skipped if not all of its pods have started by then."""
    compare_seconds: Annotated[float, Field(gt=0)] = 120
    """Seconds after which ``compare`` starts no further launch, even if the result is not significant."""
    tune_seconds: Annotated[float, Field(gt=0)] = 300
    """Total seconds of the tuner, including starts of processes. Candidates that do not fit are named."""
    numbers: Literal["keep", "may_change"] = "keep"
    """"keep": only settings that leave the numerical results of training unchanged; "may_change": also others, such as
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
        """Copy with the single dtype, reduction and mode to which models are fitted."""
        one: dict[str, Any] = {"dtypes": ["float32"], "reductions": ["sum"], "modes": ["loop"], "in_flight": [1]}
        return replace(self, **one, in_place=False)

    @property
    def short(self) -> CollectivesConfig:
        """Copy with the collectives of DDP and FSDP at every second size; takes a few seconds."""
        training: list[Operation] = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
        return replace(self, operations=training, factor=self.factor**2)

    @property
    def is_short(self) -> bool:
        return self.measuring == CollectivesConfig().short.measuring

    @property
    def is_default(self) -> bool:
        """True if all measurement settings have their defaults."""
        return self.measuring == CollectivesConfig().measuring

    @property
    def measuring(self) -> dict[str, object]:
        """Settings that decide the contents of a profile, by name."""
        return {name: value for name, value in to_dict(self).items() if name not in HANDLING}
