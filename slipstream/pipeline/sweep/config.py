"""Settings of a sweep."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.shared.errors import UserError
from slipstream.shared.settings import LARGEST, Natural, Seed, Settings, settings
from slipstream.shared.spelling import NO_NUMBER, NO_TEXT, NONE

#: Maximum number of trials, as all are read into memory.
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
    """Sample uniformly in the logarithm, so that 0.001 to 0.01 gets as many values as 0.01 to 0.1."""
    choices: list = field(default_factory=list)
    """Allowed values, of any type that the setting accepts."""

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
    """Hyperparameter search: many short trainings, then a full training with the best settings."""

    section = "sweep"

    # A bare dict, like ``model.arguments``; its values are RangeConfigs.
    space: dict = field(default_factory=dict)
    """Settings to search, by their paths: training.* and model.*, each with low and high (and log), or with choices.
    The first trial uses the configuration as given instead."""
    trials: Annotated[int, Field(ge=2, le=MOST_TRIALS)] = 50
    """Maximum number of trials, including the one with the configuration as given."""
    workers: Annotated[int, Field(ge=1, le=LARGEST)] = 1
    """Number of parallel pods on a cluster, each with one trial per process of the profile's stage "sweep". A local run
    has one worker."""
    sampler: Literal["tpe", "random"] = "tpe"
    """"tpe" learns from earlier trials (tree-structured Parzen estimator); "random" does not."""
    pruning: Annotated[Literal["asha", "none"], NONE] = "asha"
    """"asha": stop trials early that are worse than others at the same progress (asynchronous successive halving);
    null: finish all."""
    minutes: Annotated[Natural, NO_NUMBER] = 0
    """Minutes after the start of an execution from which it starts no trial; running trials continue. null: no
    limit."""
    seed: Seed = 0
    """Seed of the sampler."""
    store: Annotated[str, NO_TEXT] = ""
    """Directory or store address of the trials' records and checkpoints. null: a location that every execution of the
    same sweep finds."""

    def check(self) -> None:
        self.ranges()

    def ranges(self) -> dict[str, RangeConfig]:
        """Return the searched ranges by setting path.

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
