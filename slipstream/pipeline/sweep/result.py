"""Result of a sweep for the report, and comparison of the best settings with the given ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.pipeline.sweep import study
from slipstream.pipeline.sweep.records import CurvePoint, TrialHistory
from slipstream.pipeline.sweep.space import values_in_words
from slipstream.pipeline.sweep.store import SweepStore, best_trial
from slipstream.pipeline.sweep.worker import SweepSearch
from slipstream.shared.artifacts.results.sweep import AgainstGiven, Sweep, SweepTrial
from slipstream.shared.comparison.quality import UNITS, quality_loss
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.predict import held_out_rows, model_function, predict_records, record_targets
from slipstream.shared.storage import STORES, download_all

if TYPE_CHECKING:
    from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
    from slipstream.shared.models.trained import TrainedModel

#: Maximum points of a trial's loss curve in the report.
CURVE_POINTS = 30
LOG = logger("sweep")


def sweep_result(
    store: SweepStore, search: SweepSearch, trials: Sequence[TrialHistory], against: AgainstGiven | None
) -> Sweep:
    """Return a sweep's entry in the report; at least one trial must be complete."""
    best = best_trial(list(trials))
    assert best, "one is complete"
    rungs = search.rungs if search.config.sweep.pruning != "none" else []
    importance = study.setting_importance(search.parameters, trials)
    return Sweep(
        store=store.address,
        trials=[reported(trial) for trial in trials],
        best=best.number,
        rungs=[place / 1000 for place in rungs],
        importance={path.rpartition(".")[2]: share for path, share in importance.items()},
        against=against,
    )


def reported(trial: TrialHistory) -> SweepTrial:
    ended = trial.ended
    if ended is None:
        return SweepTrial(trial.number, "unfinished", values_in_words(trial.values))
    return SweepTrial(
        number=trial.number,
        state=ended.state,
        settings=values_in_words(trial.values),
        loss=ended.loss,
        curve=[[point.progress / 1000, point.best] for point in thin_curve(ended.curve)],
        seconds=ended.seconds,
        reason=ended.reason,
    )


def thin_curve(curve: Sequence[CurvePoint]) -> Sequence[CurvePoint]:
    """Return at most :data:`CURVE_POINTS` points, including the last."""
    every = -(-len(curve) // CURVE_POINTS) or 1
    return curve[::-1][::every][::-1]


def against_given(
    address: str, asked: ModelConfig, directory: Path, best: TrainedModel, data: PreparedData
) -> AgainstGiven | None:
    """Compare the ``best`` model with the one trained with the unchanged configuration, on the test rows.

    Validation rows selected the best of many trials, so it looks too good on them. Each confidence limit holds with
    97.5 %. The compared model, for the configuration ``asked``, is at ``address`` and downloaded into ``directory``.
    Returns None, with a warning, if it is missing, damaged or another model, since anyone with write access to the
    store may replace it. Raises ``UserError`` if the test split is empty.
    """
    records, task = held_out_rows(data), best.signature.task
    try:
        given = open_given(address, asked, directory, best.signature)
        before = predict_records(model_function(given.load()), best.signature, records)
    except UserError as error:
        LOG.warning("the best settings could not be compared with the given configuration: %s", error.message)
        return None
    after = predict_records(model_function(best.load()), best.signature, records)
    lost = quality_loss(task, record_targets(records), before, after, most=0.0, judged=2)
    return AgainstGiven(0.0 - lost.loss, 0.0 - lost.high, 0.0 - lost.low, UNITS[task], len(records))


def open_given(address: str, asked: ModelConfig, directory: Path, signature: Signature) -> TrainedModel:
    """Open the model trained with the unchanged configuration.

    Raises ``UserError`` if it is missing or belongs to another configuration.
    """
    from slipstream.shared.models.trained import TrainedModel

    there = download_all(address, directory) if address.startswith(STORES) else Path(address)
    model = TrainedModel.open(there, asked.factory)
    if model.config.base not in ("", asked.base) or model.signature != signature:
        raise UserError(f"{address}: is not the model of this configuration; expected its model.base and its columns")
    return model
