"""Simulated sweeps in virtual time, with the real sweep's decisions and with records in memory."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.sweeps.problem import EPOCHS, SPACE, Problem
from slipstream.config import RunConfig
from slipstream.pipeline.sweep import study
from slipstream.pipeline.sweep.records import CurvePoint, RungReported, TrialEnded, TrialHistory
from slipstream.pipeline.sweep.space import searched_parameters
from slipstream.pipeline.sweep.store import best_trial

#: Rungs: progress values, in thousandths of an epoch, at which trials are compared.
RUNGS = study.rung_positions(EPOCHS, EPOCHS)


def config_of(seed: int, trials: int, sampler: str = "tpe", pruning: str = "asha") -> RunConfig:
    sweep = {"space": SPACE, "trials": trials, "seed": seed, "sampler": sampler, "pruning": pruning}
    return RunConfig.from_dict({"training": {"epochs": EPOCHS}, "sweep": sweep})


@dataclass(frozen=True)
class Preemptions:
    """Random preemptions of every slot, after ``mean`` of virtual time on average.

    A preempted trial continues at once on an equal machine: from its last evaluation if ``resumes``, or from its start.
    """

    mean: float = math.inf
    resumes: bool = True

    def after(self, draw: random.Random) -> float:
        return draw.expovariate(1 / self.mean) if self.mean < math.inf else math.inf


@dataclass(frozen=True)
class Found:
    """Result of a simulated sweep.

    ``time`` is its virtual time, ``cost`` the training time summed over all slots, ``complete`` the number of trials
    that were not pruned, and ``loss`` the last loss, without noise, of the best settings found.
    """

    time: float
    cost: float
    complete: int
    loss: float


class Simulation:
    """Simulated sweep of workers with one slot each.

    Trials start until the configured number is reached, or ``budget`` (virtual time over all slots) is spent.
    """

    def __init__(self, problem: Problem, config: RunConfig, preemptions: Preemptions, budget: float = math.inf) -> None:
        self._problem, self._sweep, self._budget = problem, config.sweep, budget
        self._parameters = searched_parameters(config)
        self._preemptions = preemptions
        self._trials: list[TrialHistory] = []
        self._curves: list[list[CurvePoint]] = []
        self._cost = 0.0

    def run(self, workers: int) -> Found:
        slots = [self._slot(random.Random(f"{self._sweep.seed} {number}")) for number in range(workers)]
        now = 0.0
        due = [(now, number) for number in range(workers)]
        while due:
            now, number = heapq.heappop(due)
            takes = next(slots[number], None)
            if takes is not None:
                self._cost += takes
                heapq.heappush(due, (now + takes, number))
        best = best_trial(self._trials)
        assert best, "trial 0 is complete"
        complete = sum(trial.ended is not None and trial.ended.state == "complete" for trial in self._trials)
        return Found(now, self._cost, complete, self._problem.noiseless(best.values))

    def _slot(self, draw: random.Random) -> Iterator[float]:
        """Yield the virtual time to the slot's next event: the end of an epoch, or a preemption."""
        left = self._preemptions.after(draw)
        while len(self._trials) < self._sweep.trials and self._cost < self._budget:
            number, done = self._propose(), 0
            takes = self._problem.epoch_time(self._trials[number].values)
            while self._trials[number].ended is None:
                if left < takes:
                    yield left
                    left = self._preemptions.after(draw)
                    done = done if self._preemptions.resumes else 0
                    continue
                left -= takes
                yield takes
                done += 1
                self._evaluate(number, done)

    def _propose(self) -> int:
        number = len(self._trials)
        values = study.propose_trial(self._sweep, self._parameters, self._trials).values
        self._trials.append(TrialHistory(number, values))
        self._curves.append([])
        return number

    def _evaluate(self, number: int, epoch: int) -> None:
        trial, curve = self._trials[number], self._curves[number]
        if epoch > len(curve):  # otherwise this epoch is repeated after a restart
            loss = self._problem.loss(trial.values, epoch)
            curve.append(CurvePoint(1000 * epoch, loss, min(loss, curve[-1].best if curve else math.inf)))
        if epoch == EPOCHS:
            self._trials[number] = replace(trial, ended=TrialEnded("complete", curve[-1].best, curve))
        elif self._stops(trial, curve[epoch - 1]):
            self._trials[number] = replace(self._trials[number], ended=TrialEnded("pruned", curve[-1].best, curve))

    def _stops(self, trial: TrialHistory, point: CurvePoint) -> bool:
        """Return True if a worker would prune the trial at this point, and add this to the trial's reports."""
        if not study.is_due(RUNGS, trial, point.progress):
            return False
        report = RungReported(point.progress, point.best, stops=False)
        stops = study.stops_at_rung(self._sweep, RUNGS, self._trials, trial, report)
        self._trials[trial.number] = replace(trial, reports=(*trial.reports, replace(report, stops=stops)))
        return stops


def optuna_alone(problem: Problem, trials: int) -> Found:
    """Run the same search by ``study.optimize``, with Optuna's TPE and successive halving, in one process."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    costs = []

    def objective(trial: optuna.Trial) -> float:
        values = {
            path: trial.suggest_int(path, int(bounds["low"]), int(bounds["high"]), log=True)
            if isinstance(bounds["low"], int)
            else trial.suggest_float(path, bounds["low"], bounds["high"], log=bool(bounds.get("log")))
            for path, bounds in sorted(SPACE.items())
        }
        best = math.inf
        for epoch in range(1, EPOCHS + 1):
            costs.append(problem.epoch_time(values))
            best = min(best, problem.loss(values, epoch))
            trial.report(best, 1000 * epoch)
            if epoch < EPOCHS and trial.should_prune():
                raise optuna.TrialPruned
        return best

    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=RUNGS[0], reduction_factor=study.REDUCTION)
    made = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=problem.seed), pruner=pruner)
    made.optimize(objective, n_trials=trials)
    complete = len(made.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE]))
    return Found(sum(costs), sum(costs), complete, problem.noiseless(made.best_params))
