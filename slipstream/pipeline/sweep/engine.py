"""Stages of a sweep: start or resume it, work on it, and collect its trials."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import RunConfig
from slipstream.pipeline.sweep import study
from slipstream.pipeline.sweep.records import CurvePoint, SweepIdentity, TrialHistory
from slipstream.pipeline.sweep.space import searched_parameters, values_in_words, with_values
from slipstream.pipeline.sweep.store import OccupiedSlots, SweepStore, best_trial, early_end_reason
from slipstream.pipeline.sweep.worker import POLL_S, SweepSearch, SweepWorker, WorkerPod
from slipstream.pipeline.train.config import resume_settings
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.artifacts.results.sweep import AgainstGiven, Sweep, SweepTrial
from slipstream.shared.comparison.quality import UNITS, quality_loss
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.predict import decided_outputs, held_out_rows, record_targets
from slipstream.shared.settings import to_dict
from slipstream.shared.storage import STORES, download_all

if TYPE_CHECKING:
    from slipstream.shared.artifacts.prepared.data import Signature
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
        before = decided_outputs(given, records)
    except UserError as error:
        LOG.warning("the best settings could not be compared with the given configuration: %s", error.message)
        return None
    after = decided_outputs(best, records)
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


def sweep_identity(config: RunConfig, content: str) -> SweepIdentity:
    """Return the identity of a sweep on prepared data with the fingerprint ``content``."""
    sweep = config.sweep
    model = {**to_dict(config.model.without_addresses()), "base": ModelOrigin(config.model).digest}
    return SweepIdentity(content, model, resume_settings(config.for_training()), sweep.space, sweep.seed)


def sweep_search(config: RunConfig, data: PreparedData) -> SweepSearch:
    """Return the search of a configuration: its parameters and rungs.

    Raises ``UserError`` if the space has unknown settings or invalid values.
    """
    from slipstream.pipeline.train.data_loader import stored_blocks
    from slipstream.pipeline.train.data_order import GlobalOrder

    config = config.for_data(data)
    training = config.for_training()
    epoch = GlobalOrder(stored_blocks(data, "train"), training.rows_per_step, training.seed).steps_per_epoch
    evaluations = math.ceil(training.epochs * epoch / (training.evaluate_every or epoch))
    return SweepSearch(config, searched_parameters(config), study.rung_positions(training.epochs, evaluations))


def start_sweep(config: RunConfig, data: PreparedData, address: str) -> None:
    """Start or resume the sweep in the store at ``address``.

    Raises ``UserError`` if the space has an unknown setting or model argument or an invalid value, or if the store
    holds another sweep.
    """
    from slipstream.shared.models.factory import build_model

    search = sweep_search(config, data)
    config, parameters = search.config, search.parameters
    for parameter in parameters:
        if parameter.path.startswith("model."):
            for value in parameter.extremes:
                tried = with_values(config, {parameter.path: value})
                build_model(tried.model, data.signature, tried.training.seed, empty=True)
    SweepStore(address, parameters).open(sweep_identity(config, data.artifact.content))
    LOG.info("the trials of this sweep are listed by: slipstream sweep %s", address)


def run_trials(config: RunConfig, address: str, pod: WorkerPod) -> None:
    """Train trials of the sweep at ``address`` until none is left for this worker.

    Raises the errors of :meth:`~slipstream.pipeline.sweep.worker.SweepWorker.run`, and ``UserError`` if the store holds
    another sweep.
    """
    data = open_prepared(pod.prepared)
    search = sweep_search(config, data)
    store = SweepStore(address, search.parameters)
    store.open(sweep_identity(search.config, data.artifact.content))
    pod.scratch.mkdir(parents=True, exist_ok=True)
    SweepWorker(store, search, pod).run()


def ended_trials(store: SweepStore, observer: OccupiedSlots) -> list[TrialHistory]:
    """Wait until no trial is running, and return all trials.

    Raises ``UserError`` if the first trials all failed or none is complete.
    """
    while True:
        trials = store.trials()
        unfinished = [trial.number for trial in trials if not trial.ended]
        if not any(observer.look(number).held is not False for number in unfinished):
            break
        time.sleep(POLL_S)
    if why := early_end_reason(trials):
        raise UserError(why)
    if best_trial(trials) is None:
        failed = next((trial for trial in trials if trial.ended and trial.ended.state == "failed"), None)
        why = f"; trial {failed.number} failed: {failed.ended.reason}" if failed and failed.ended else ""
        raise UserError(f"sweep: none of {len(trials)} started trials is complete{why}; start again to continue")
    if unfinished:
        LOG.warning("%d trials have not ended and are ignored; start again to continue them", len(unfinished))
    return trials
