"""Optuna's decisions from the records: next settings, pruning, and importance.

Every call builds an in-memory study, and no Optuna state is kept, so equal records give equal answers. Sampling:
Bergstra and others, "Algorithms for Hyper-Parameter Optimization" (NeurIPS 2011), with running trials counted as bad
ones ("constant liar": Ginsbourger and others 2010). Pruning: Li and others, "A System for Massively Parallel
Hyperparameter Tuning" (MLSys 2020), in the variant that stops trials instead of pausing them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.pipeline.sweep.config import SweepConfig
from slipstream.pipeline.sweep.records import RungReported, TrialHistory, TrialProposed, unchanged_trial
from slipstream.pipeline.sweep.space import SearchedParameter, choice_text

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

#: Reduction factor of successive halving: one in this many trials continues beyond a rung.
REDUCTION = 3
MOST_RUNGS = 4


def rung_positions(epochs: int, evaluations: int) -> list[int]:
    """Return the rungs of a training, in thousandths of an epoch.

    Every rung is :data:`REDUCTION` times the previous one. The last is a third of ``epochs``; the first is not before
    the first of the training's ``evaluations``.
    """
    number = 0
    while number < MOST_RUNGS and REDUCTION ** (number + 1) <= evaluations:
        number += 1
    first = 1000 * epochs // REDUCTION**number
    return [first * REDUCTION**power for power in range(number)]


def is_due(places: Sequence[int], trial: TrialHistory, progress: int) -> bool:
    """Return True if a trial has reached a rung that it has not reported."""
    before = max((report.progress for report in trial.reports), default=0)
    return any(before < place <= progress for place in places)


def propose_trial(
    sweep: SweepConfig, parameters: Sequence[SearchedParameter], trials: Sequence[TrialHistory]
) -> TrialProposed:
    """Return the next trial: the unchanged configuration first, then sampled values."""
    if unchanged_trial(trials) is None:
        return TrialProposed({})
    study = study_of(trials, parameters, sampler_of(sweep, len(trials)))
    asked = study.ask({each.path: distribution_of(each) for each in parameters})
    return TrialProposed({each.path: value_of(each, asked.params[each.path]) for each in parameters})


def stops_at_rung(
    sweep: SweepConfig, places: Sequence[int], trials: Sequence[TrialHistory], now: TrialHistory, report: RungReported
) -> bool:
    """Return True if the trial ``now``, one of ``trials``, stops at this report.

    The unchanged configuration never stops, because the best trial is compared with it.
    """
    if sweep.pruning == "none" or not now.values or not places:
        return False
    from optuna.pruners import SuccessiveHalvingPruner

    study = study_of([], ())
    for each in trials:
        if each.number != now.number:
            study.add_trial(running_trial(at_rungs(each, places), {}))
    study.add_trial(running_trial(at_rungs(now, places), {report.progress: report.best}))
    pruner = SuccessiveHalvingPruner(min_resource=places[0], reduction_factor=REDUCTION)
    return bool(pruner.prune(study, study.trials[-1]))


def at_rungs(trial: TrialHistory, places: Sequence[int]) -> dict[str, float]:
    """Return a trial's losses at rungs, under the keys of Optuna's pruner."""
    found = {}
    for rung, place in enumerate(places):
        if past := [report for report in trial.reports if report.progress >= place]:
            found[f"completed_rung_{rung}"] = past[0].best
    return found


def setting_importance(parameters: Sequence[SearchedParameter], trials: Sequence[TrialHistory]) -> dict[str, float]:
    """Return, by path, the fraction of the loss's variance that each setting explains, largest first.

    Computed from complete trials; fractions sum to 1. Empty if there are too few trials. Source: Hutter, Hoos and
    Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter Importance" (ICML 2014).
    """
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    complete = [each for each in trials if each.ended and each.ended.state == "complete" and each.values]
    losses = {each.ended.loss for each in complete if each.ended}
    if len(complete) < 2 * len(parameters) + 2 or len(losses) < 2:
        return {}
    study = study_of(complete, parameters)
    return dict(get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0)))


# Optuna's side


def study_of(trials: Sequence[TrialHistory], parameters: Sequence[SearchedParameter], sampler: Any = None) -> Study:
    """Return an Optuna study of the trials.

    It excludes the unchanged configuration, whose values are not part of the space.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    distributions = {each.path: distribution_of(each) for each in parameters}
    for trial in trials:
        if trial.values:
            study.add_trial(as_optuna(trial, parameters, distributions))
    return study


def as_optuna(
    trial: TrialHistory, parameters: Sequence[SearchedParameter], distributions: dict[str, BaseDistribution]
) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    ended = trial.ended
    state = {None: TrialState.RUNNING, "complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(
        ended.state if ended else None, TrialState.FAIL
    )
    reports = {point.progress: point.best for point in ended.curve} if ended else {}
    reports |= {report.progress: report.best for report in trial.reports}
    return create_trial(
        state=state,
        value=ended.loss if ended and ended.state in ("complete", "pruned") else None,
        params={each.path: optuna_value(each, trial.values[each.path]) for each in parameters},
        distributions=distributions,
        intermediate_values=reports,
    )


def running_trial(attributes: dict[str, Any], reports: dict[int, float]) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    return create_trial(state=TrialState.RUNNING, system_attrs=attributes, intermediate_values=reports)


def sampler_of(sweep: SweepConfig, number: int) -> Any:
    """Return a sampler seeded by the trial's number, independent of earlier draws."""
    from optuna.samplers import RandomSampler, TPESampler

    seed = int.from_bytes(hashlib.sha256(f"{sweep.seed} {number}".encode()).digest()[:4], "big")
    if sweep.sampler == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):
        return TPESampler(seed=seed, constant_liar=True)


def distribution_of(parameter: SearchedParameter) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.range.choices:
        return CategoricalDistribution([choice_text(choice) for choice in parameter.range.choices])
    low, high = parameter.extremes
    kind: Any = IntDistribution if parameter.whole else FloatDistribution
    return kind(low, high, log=parameter.range.log)


def value_of(parameter: SearchedParameter, drawn: Any) -> Any:
    """Convert Optuna's value to the setting's; choices are JSON texts, as Optuna accepts no lists."""
    if parameter.range.choices:
        return json.loads(drawn)
    low, high = parameter.extremes
    return min(max(drawn, low), high)  # the exponential of a logarithm may be off by its last bit


def optuna_value(parameter: SearchedParameter, value: Any) -> Any:
    return choice_text(value) if parameter.range.choices else value
