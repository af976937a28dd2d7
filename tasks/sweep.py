"""Flyte tasks of a sweep.

None is cached: trials are kept in the sweep's own store, from which a restarted sweep resumes.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import Prepared, Trained
from slipstream.flyte.forked_workers import start_server
from slipstream.flyte.homes import checkpoint_address, this_attempt
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.stage import fresh_directory, local_path, map_errors, rows_path, runs_locally
from slipstream.shared.artifacts.records import to_tree
from slipstream.shared.artifacts.results.sweep import Sweep
from slipstream.shared.artifacts.workspaces import SWEEPS, Holder
from slipstream.shared.errors import Preempted, UserError
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.profiles.profile import current_profile
from tasks.train import ENDING_S, fetch_prepared

if TYPE_CHECKING:
    from slipstream.shared.artifacts.prepared.data import PreparedData


class StartedSweep(NamedTuple):
    """Address of the sweep's store, and indices of its workers."""

    store: str
    workers: list[int]


@task(**stage_metadata("fingerprint"))
@map_errors
def begin_sweep(prepared: Prepared, config: RunConfig) -> StartedSweep:
    """Start or resume a sweep.

    Raises ``UserError`` before any trial starts if the space has an unknown setting or an invalid value, or if the
    store holds another sweep.
    """
    from slipstream.pipeline.sweep.engine import start_sweep, sweep_identity

    data = open_data(prepared)
    identity = sweep_identity(config.for_data(data), data.artifact.content)
    placement = current_profile().placement("sweep")
    address = config.sweep.store or checkpoint_address("sweep", {"sweep": to_tree(identity)}, placement, SWEEPS)
    start_sweep(config, data, address)
    return StartedSweep(address, list(range(config.sweep.workers)))


def open_data(prepared: Prepared) -> PreparedData:
    from slipstream.shared.artifacts.prepared.streamed import open_prepared

    return open_prepared(rows_path(prepared))


@task(**stage_metadata("sweep"))
@map_errors
def search(worker: int, store: str, prepared: Prepared, config: RunConfig) -> float:
    """Run trials of a sweep until none is left to start; return its duration in seconds."""
    from slipstream.pipeline.sweep.engine import run_trials
    from slipstream.pipeline.sweep.worker import WorkerPod

    placement, started = current_profile().placement("sweep"), time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // placement.processes)))
    here, who = fetch_prepared(prepared, placement, fresh_directory("sweep.prepared")), this_attempt()
    pod = WorkerPod(
        prepared=here,
        scratch=fresh_directory("trials"),
        slots=placement.processes,
        # Attempts of one worker follow each other; different workers run at the same time.
        holder=Holder(f"{who.execution} worker {worker}", who.attempt, who.prefix),
        execution=who.execution,
        notices=placement.notices,
        grace_s=placement.grace_seconds - ENDING_S,
    )
    if runs_locally():
        start_server("train")  # trials are forked from the same server
    try:
        run_trials(config, store, pod)
    except Preempted as error:
        if runs_locally():
            raise UserError(f"sweep: interrupted ({error}); start it again to go on") from None
        raise FlyteRecoverableException(str(error)) from error
    return round(time.perf_counter() - started, 3)


class SweepChoice(NamedTuple):
    """Configuration with the best settings, and seconds of the slowest worker."""

    config: RunConfig
    seconds: float


@task(**stage_metadata("fingerprint"))
@map_errors
def choose_settings(store: str, searched: list[float | None], config: RunConfig) -> SweepChoice:
    """Return the configuration with the settings of the best trial, after all workers have ended.

    Raises ``UserError`` if all workers failed, if all of the first trials failed, or if none is complete.
    """
    from slipstream.pipeline.sweep.engine import ended_trials
    from slipstream.pipeline.sweep.space import searched_parameters, with_values
    from slipstream.pipeline.sweep.store import OccupiedSlots, SweepStore, best_trial

    swept = SweepStore(store, searched_parameters(config))
    trials = ended_trials(swept, OccupiedSlots(swept, Holder()))
    took = [seconds for seconds in searched if seconds is not None]
    if not took:
        ended = sum(trial.ended is not None for trial in trials)
        raise UserError(f"sweep: every worker failed, with {ended} of {config.sweep.trials} trials; start again")
    best = best_trial(trials)
    assert best, "one is complete"
    return SweepChoice(replace(with_values(config, best.values), sweep=config.sweep), max(took))


@task(**stage_metadata("export", cached=False))
@map_errors
def compare_with_given(
    trained: Trained, prepared: Prepared, store: str, config: RunConfig, factory: str, seconds: float
) -> Sweep:
    """Return the result of the sweep, which took ``seconds``.

    The model trained with the best settings is compared on the test rows with the model trained with ``config``, the
    unchanged configuration. ``factory`` is the model factory that the best settings name if it is the user's own, else
    "".
    """
    from slipstream.pipeline.sweep.engine import against_given, sweep_result, sweep_search
    from slipstream.pipeline.sweep.records import unchanged_trial
    from slipstream.pipeline.sweep.store import SweepStore, best_trial
    from slipstream.shared.models.trained import TrainedModel

    data = open_data(prepared)
    search = sweep_search(config, data)
    swept = SweepStore(store, search.parameters)
    trials = swept.trials()
    best, given = best_trial(trials), unchanged_trial(trials)
    against = None
    if best and best.values and given and given.ended and given.ended.state == "complete":
        chosen = TrainedModel.open(local_path(trained), factory)
        against = against_given(swept.model(given.number), config.model, fresh_directory("given"), chosen, data)
    return replace(sweep_result(swept, search, trials, against), seconds=seconds)
