"""Settings of a sweep."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.errors import UserError
from slipstream.settings import LARGEST, Natural, Seed, Settings, settings

#: All trials are read into memory.
MOST_TRIALS = 10_000


@settings
class RangeConfig(Settings):
    """Values of one setting: from ``low`` to ``high``, or one of ``choices``."""

    section = "sweep.space"

    low: float | None = None
    """Smallest value."""
    high: float | None = None
    """Largest value."""
    log: bool = False
    """Draw from the logarithm of the range, so that 0.001 to 0.01 counts as much as 0.01 to 0.1."""
    choices: list = field(default_factory=list)
    """Values to choose from, of any type that the setting has."""

    def check(self) -> None:
        if self.choices:
            if self.low is not None or self.high is not None or self.log:
                raise UserError("has choices and a range; expected either choices, or low and high")
            if len(self.choices) < 2:
                raise UserError("has one choice; expected at least two, or no entry in sweep.space")
            return
        if self.low is None or self.high is None:
            raise UserError("expected low and high, or choices")
        if self.low >= self.high:
            raise UserError(f"low {self.low:g} is not below high {self.high:g}")
        if self.log and self.low <= 0:
            raise UserError(f"log: low is {self.low:g}; expected more than 0 for a logarithmic range")


@settings
class SweepConfig(Settings):
    """Hyperparameter search: many short trainings, then a normal training of the best."""

    section = "sweep"

    # A bare dict, as ``model.arguments``; its values are RangeConfigs.
    space: dict = field(default_factory=dict)
    """Settings to search by their paths, training.* and model.*, every one with low and high (and log), or with
    choices. The first trial is the configuration as given."""
    trials: Annotated[int, Field(ge=2, le=MOST_TRIALS)] = 50
    """Maximum number of trainings, the one as given included."""
    workers: Annotated[int, Field(ge=1, le=LARGEST)] = 1
    """Pods that work at the same time on a cluster, each on as many trials as its profile's stage sweep has processes.
    One machine has one worker."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Method that chooses settings: "tpe" learns from the trials before (tree-structured Parzen estimator)."""
    pruning: Literal["asha", "none"] = "asha"
    """Early end of trials: "asha" stops those that are worse than others at the same point (asynchronous successive
    halving)."""
    minutes: Natural = 0
    """Minutes after which no new trial starts; started trials end as usual. 0 means no limit."""
    seed: Seed = 0
    """Seed of the sampler."""
    store: str = ""
    """Directory or store address for the records and checkpoints of the trials. Empty: a location that every execution
    of the same sweep finds."""

    def check(self) -> None:
        self.ranges()

    def ranges(self) -> dict[str, RangeConfig]:
        """Return the space by path.

        Raises ``UserError`` for an invalid path or range.
        """
        found = {}
        for path, value in self.space.items():
            if not isinstance(path, str) or not path.startswith(("training.", "model.")):
                raise UserError(f"sweep.space: {path!r} cannot be searched; expected training.… or model.…")
            where = f"sweep.space[{path}]"
            if not isinstance(value, dict):
                raise UserError(f"{where}: {value!r} is not allowed; expected low and high, or choices")
            try:
                found[path] = RangeConfig.from_dict(value)
            except UserError as error:
                raise UserError(f"{where}: {error.message.removeprefix('sweep.space').removeprefix('.')}") from None
        return found


#: Values of settings by path.
Values = dict[str, Any]
