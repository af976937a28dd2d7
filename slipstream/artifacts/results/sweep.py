"""Result of a sweep, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["complete", "pruned", "failed", "unfinished"]
STATES: tuple[State, ...] = ("complete", "pruned", "failed", "unfinished")
#: Settings, in words, of the trial that has none of the space.
AS_GIVEN = "as given"


@dataclass(frozen=True)
class SweepTrial:
    """Trial of a sweep.

    ``loss`` is its smallest validation loss, None if it failed. ``curve`` are pairs of an epoch and the smallest
    validation loss up to it.
    """

    number: int
    state: State
    #: The tried settings, in words.
    settings: str
    loss: float | None = None
    curve: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_given(self) -> bool:
        """True for the trial of the configuration as given."""
        return self.settings == AS_GIVEN


@dataclass(frozen=True)
class AgainstGiven:
    """Gain of the model with the best settings over the model with the settings as given, on the same test rows.

    It is in points of accuracy or percent of RMSE, with its 95 % interval.
    """

    gain: float
    low: float
    high: float
    unit: str
    rows: int

    @property
    def answer(self) -> Literal["better", "worse", "can't tell"]:
        """Conclusion from the interval."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "can't tell"

    @property
    def sentence(self) -> str:
        than = "than the settings as given"
        said = f"{self.answer} {than}" if self.answer != "can't tell" else f"not significantly better {than}"
        interval = f"95 % interval {self.low:+.2f} to {self.high:+.2f}"
        return f"{said}: {self.gain:+.2f} {self.unit} on {self.rows:,} test rows ({interval})"


@dataclass(frozen=True)
class Sweep:
    """Trials and outcome of a sweep.

    ``best`` is the number of the trial whose settings the model was trained with. ``against`` is None if these are the
    settings as given, or if there is no trained model with those. ``rungs`` are the epochs at which trials were
    compared. ``importance`` is the share of every setting in the differences between complete trials, the largest
    first, empty if there are too few.
    """

    store: str
    trials: list[SweepTrial]
    best: int
    rungs: list[float] = field(default_factory=list)
    importance: dict[str, float] = field(default_factory=dict)
    against: AgainstGiven | None = None
    #: Time of the slowest worker.
    seconds: float = 0.0

    @property
    def counts(self) -> dict[State, int]:
        """Number of trials by state, without states that do not occur."""
        states = [trial.state for trial in self.trials]
        return {state: states.count(state) for state in STATES if state in states}

    @property
    def worth(self) -> str:
        """Statement whether the found settings are significantly better, without a full stop."""
        if self.against:
            return self.against.sentence
        if self.best_trial.is_given:
            return "the settings as given were the best of all trials"
        return "no model was trained with the settings as given, so there is no comparison"

    @property
    def best_trial(self) -> SweepTrial:
        return next(trial for trial in self.trials if trial.number == self.best)
