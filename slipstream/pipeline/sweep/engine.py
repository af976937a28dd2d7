"""Stages of a sweep: start or resume it, work on it, and collect its trials."""

from __future__ import annotations

import math
import time

from slipstream.config import RunConfig
from slipstream.pipeline.sweep import study
from slipstream.pipeline.sweep.records import SweepIdentity, TrialHistory
from slipstream.pipeline.sweep.slots import OccupiedSlots
from slipstream.pipeline.sweep.space import searched_parameters, with_values
from slipstream.pipeline.sweep.store import SweepStore, best_trial, early_end_reason
from slipstream.pipeline.sweep.worker import POLL_S, SweepSearch, SweepWorker, WorkerPod
from slipstream.pipeline.train.config import resume_settings
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.models.base.fingerprint import fingerprint_origin
from slipstream.shared.settings import to_dict

LOG = logger("sweep")


def sweep_identity(config: RunConfig, content: str) -> SweepIdentity:
    """Return the identity of a sweep on prepared data with the fingerprint ``content``."""
    sweep = config.sweep
    model = {**to_dict(config.model.without_addresses()), "base": fingerprint_origin(config.model)}
    return SweepIdentity(content, model, resume_settings(config.for_training()), sweep.space, sweep.seed)


def sweep_search(config: RunConfig, data: PreparedData) -> SweepSearch:
    """Return the search of a configuration: its parameters and rungs.

    Raises ``UserError`` if the space has unknown settings or invalid values.
    """
    from slipstream.pipeline.train.data_loader import stored_blocks
    from slipstream.pipeline.train.data_order import GlobalOrder

    training = config.for_training()
    epoch = GlobalOrder(stored_blocks(data, "train"), training.batch_size, training.seed).steps_per_epoch
    evaluations = math.ceil(training.epochs * epoch / (training.evaluate_every or epoch))
    return SweepSearch(config, searched_parameters(config), study.rung_positions(training.epochs, evaluations))


def start_sweep(config: RunConfig, data: PreparedData, address: str) -> None:
    """Start or resume the sweep in the store at ``address``.

    Raises ``UserError`` if the space has an unknown setting or model argument or an invalid value, or if the store
    holds another sweep.
    """
    from slipstream.shared.models.factory import build_model

    parameters = sweep_search(config, data).parameters
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
    store.open(sweep_identity(config, data.artifact.content))
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
