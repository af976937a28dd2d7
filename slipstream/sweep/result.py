"""What a sweep hands to the report, and the comparison that says whether it was worth it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.artifacts.results.sweep import AgainstGiven, Sweep, SweepTrial
from slipstream.comparison.quality import UNITS, loss_of
from slipstream.models.predict import held_out_rows, model_function, predict, targets_of
from slipstream.sweep import study
from slipstream.sweep.records import Point, Trial
from slipstream.sweep.space import words
from slipstream.sweep.store import SweepStore, best_of
from slipstream.sweep.worker import Search

if TYPE_CHECKING:
    from slipstream.artifacts.prepared.data import PreparedData
    from slipstream.models.trained import TrainedModel

#: Points of a trial's curve that the report has.
CURVE_POINTS = 30


def sweep_of(store: SweepStore, search: Search, trials: Sequence[Trial], against: AgainstGiven | None) -> Sweep:
    """Of trials of which one at least is complete."""
    best = best_of(list(trials))
    assert best, "one is complete"
    rungs = search.rungs if search.config.sweep.pruning != "none" else []
    importance = study.importance(search.parameters, trials)
    return Sweep(
        store=store.address,
        trials=[reported(trial) for trial in trials],
        best=best.number,
        rungs=[place / 1000 for place in rungs],
        importance={path.rpartition(".")[2]: share for path, share in importance.items()},
        against=against,
    )


def reported(trial: Trial) -> SweepTrial:
    ended = trial.ended
    if ended is None:
        return SweepTrial(trial.number, "unfinished", words(trial.values))
    return SweepTrial(
        number=trial.number,
        state=ended.state,
        settings=words(trial.values),
        loss=ended.loss,
        curve=[[point.progress / 1000, point.best] for point in thinned(ended.curve)],
        seconds=ended.seconds,
        reason=ended.reason,
    )


def thinned(curve: Sequence[Point]) -> Sequence[Point]:
    """At most so many points, the last among them."""
    every = -(-len(curve) // CURVE_POINTS) or 1
    return curve[::-1][::every][::-1]


def against_given(given: TrainedModel, best: TrainedModel, data: PreparedData) -> AgainstGiven:
    """The trained models of the settings as given and of the best ones on the test rows: the best of many trials looks
    better on the rows by which it was chosen than it is, so others decide. Each limit may err with 2.5 %.

    Raises ``UserError`` if the test split is empty.
    """
    records, task = held_out_rows(data), best.signature.task
    before, after = (predict(model_function(each.load()), each.signature, records) for each in (given, best))
    lost = loss_of(task, targets_of(records), before, after, most=0.0, judged=2)
    return AgainstGiven(0.0 - lost.loss, 0.0 - lost.high, 0.0 - lost.low, UNITS[task], len(records))
