"""Result of a sweep, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["complete", "pruned", "failed", "unfinished"]
STATES: tuple[State, ...] = ("complete", "pruned", "failed", "unfinished")
#: Value of ``settings`` for the trial without changes to the configuration.
AS_GIVEN = "as given"


@dataclass(frozen=True)
class SweepTrial:
    """Trial of a sweep.

    ``loss`` is its smallest validation loss, None if it failed. ``curve`` has pairs of an epoch and the smallest
    validation loss until then.
    """

    number: int
    state: State
    #: Changed settings as text, or :data:`AS_GIVEN`.
    settings: str
    loss: float | None = None
    curve: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_given(self) -> bool:
        """True for the trial with the unchanged configuration."""
        return self.settings == AS_GIVEN


@dataclass(frozen=True)
class AgainstGiven:
    """Gain of the best settings over the unchanged configuration, between two models on the same test rows.

    The unit is points of accuracy or percent of RMSE; ``low`` and ``high`` are 95 % limits.
    """

    gain: float
    low: float
    high: float
    unit: str
    rows: int

    @property
    def answer(self) -> Literal["better", "worse", "can't tell"]:
        """Conclusion: "better" or "worse" if the 95 % interval excludes 0, else "can't tell"."""
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

    ``best`` is the number of the trial whose settings trained the final model. ``against`` is None if these are
    unchanged, or if no model was trained with unchanged settings. ``rungs`` are the epochs at which trials were
    compared. ``importance`` is the share of every setting in the loss differences between complete trials, largest
    first; empty if there are too few.
    """

    store: str
    trials: list[SweepTrial]
    best: int
    rungs: list[float] = field(default_factory=list)
    importance: dict[str, float] = field(default_factory=dict)
    against: AgainstGiven | None = None
    #: Time of the slowest worker, in seconds.
    seconds: float = 0.0

    @property
    def counts(self) -> dict[State, int]:
        states = [trial.state for trial in self.trials]
        return {state: states.count(state) for state in STATES if state in states}

    @property
    def worth(self) -> str:
        """Clause that says whether the best settings are significantly better than the unchanged configuration."""
        if self.against:
            return self.against.sentence
        if self.best_trial.is_given:
            return "the settings as given were the best of all trials"
        return "no model was trained with the settings as given, so there is no comparison"

    @property
    def best_trial(self) -> SweepTrial:
        return next(trial for trial in self.trials if trial.number == self.best)
