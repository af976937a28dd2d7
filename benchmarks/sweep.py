"""Quality of a sweep's decisions in virtual time, and overhead of a trial besides its steps.

    python benchmarks/sweep.py [OPTIONS]

*simulated*: synthetic trainings with learning curves that cross; the unit of virtual time is a whole training.
``slipstream.pipeline.sweep.study`` proposes settings and stops trials; records are kept in memory. Every seed is
another problem. Compared are one worker; eight workers; eight workers whose slots are preempted at exponential
intervals, every half of a training on average, so that trials resume from the last evaluation or restart; random search
of whole trainings at the cost of the eight workers; ``optuna.study.optimize`` with the sweep's sampler and pruner. The
loss is the last one, without noise, of the best settings found. *behind* is our loss minus the other search's, paired
by seed, with a distribution-free 95 % interval.

*real*: a worker with one slot trains some settings of a model on the handwritten digits, and ``pyflyte run`` trains it
by the Flyte task ``train``, in turns: wall-clock seconds besides steps and evaluations, with one process of one thread.
For the worker these are the seconds from a trial's start to the next trial's. The seconds before its first trial, in
which the trials' fork server loads torch, are reported separately. *in the stage* is the task's own measurement,
without the start of ``pyflyte``.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from harness.command import benchmark, part_option
from harness.sweeps.overheads import through_the_task, trials_of_a_worker
from harness.sweeps.problem import Problem
from harness.sweeps.simulation import Found, Preemptions, Simulation, config_of, optuna_alone
from harness.table import Column, Table
from slipstream.operations.proofs.turns import interval_of_median
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.source.config import DataConfig

SEEDS, TRIALS, WORKERS, HALF = 20, 200, 8, 0.5
ONE, MANY, RANDOM, ALONE = "one worker", f"{WORKERS} workers", "random search, equal cost", "study.optimize alone"
RESUMED, AGAIN = f"{WORKERS}, preempted, resumed", f"{WORKERS}, preempted, from scratch"
WHOLE = (
    Column("time", "time"),
    Column("cost", "cost"),
    Column("complete", "complete", "{:.0f}"),
    Column("loss", "loss", "{:.4f}"),
)
RATIOS = (
    Column("ratio", "ratio", "{:.3f}"),
    Column("95 % from", "low", "{:.3f}"),
    Column("to", "high", "{:.3f}"),
)
LOSSES = (
    Column("behind", "behind"),
    Column("95 % from", "from"),
    Column("to", "to"),
    Column("better", "better"),
)
COSTS = (
    Column("besides, s", "besides", "{:.2f}"),
    Column("in the stage, s", "stage", "{:.2f}"),
    Column("before the first, s", "first", "{:.2f}"),
    Column("steps, evaluations, s", "working", "{:.2f}"),
    Column("over the task", "ratio", "{:.3f}"),
    Column("over its stage", "ratio_stage", "{:.3f}"),
)


# Simulated


def searches(seed: int, trials: int) -> dict[str, Found]:
    problem, config = Problem(seed), config_of(seed, trials)

    def swept(workers: int, preemptions: Preemptions) -> Found:
        return Simulation(problem, config, preemptions).run(workers)

    many = swept(WORKERS, Preemptions())
    whole = config_of(seed, 10_000, "random", "none")
    return {
        ONE: swept(1, Preemptions()),
        MANY: many,
        RESUMED: swept(WORKERS, Preemptions(HALF)),
        AGAIN: swept(WORKERS, Preemptions(HALF, resumes=False)),
        RANDOM: Simulation(problem, whole, Preemptions(), budget=many.cost).run(1),
        ALONE: optuna_alone(problem, trials),
    }


def simulated(seeds: int, trials: int) -> Iterator[Table]:
    found: dict[str, list[Found]] = {}
    for seed in range(seeds):
        for name, each in searches(seed, trials).items():
            found.setdefault(name, []).append(each)
        click.echo(f"  seed {seed}: " + ", ".join(f"{each[-1].loss:.4f}" for each in found.values()), err=True)
    crossing = statistics.median(Problem(seed).crossing(1000) for seed in range(seeds))
    remark = f"{crossing:.0%} of pairs of settings change their order between the first epoch and the last"
    rows = {name: medians_of(each) for name, each in found.items()}
    yield Table(f"{seeds} seeds, {trials} trials, virtual time in whole trainings, medians", WHOLE, rows, (remark,))

    def ratio(of: str, to: str, what: Callable[[Found], float]) -> dict[str, float]:
        pairs = zip(found[of], found[to], strict=True)
        middle, low, high = interval_of_median([what(one) / what(other) for one, other in pairs])
        return {"ratio": middle, "low": low, "high": high}

    yield Table(
        "over the same without",
        RATIOS,
        {
            f"{MANY}, time, over one": ratio(MANY, ONE, lambda each: each.time),
            f"{RESUMED}, cost": ratio(RESUMED, MANY, lambda each: each.cost),
            f"{AGAIN}, cost": ratio(AGAIN, MANY, lambda each: each.cost),
        },
    )
    against = {f"{of}, against {to}": behind(found[of], found[to]) for of, to in ((MANY, RANDOM), (ONE, ALONE))}
    yield Table("losses, paired by seed", LOSSES, against)


def medians_of(found: Sequence[Found]) -> dict[str, float]:
    return {key: statistics.median(vars(each)[key] for each in found) for key in ("time", "cost", "complete", "loss")}


def behind(ours: Sequence[Found], theirs: Sequence[Found]) -> Mapping[str, str]:
    """Return the paired differences of losses as text, because a table's numbers cannot be negative."""
    differences = [one.loss - other.loss for one, other in zip(ours, theirs, strict=True)]
    better = f"{sum(each < 0 for each in differences)} of {len(differences)}"
    words = (f"{each:+.5f}" for each in interval_of_median(differences))
    return dict(zip(("behind", "from", "to"), words, strict=True)) | {"better": better}


# Real


def real(rounds: int, trials: int, epochs: int) -> Table:
    swept, asked = [], []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        prepare(place / "prepared", "", "", DataConfig(), {})
        for round_ in range(rounds):
            worker, task = place / f"worker-{round_}", place / f"task-{round_}"
            for ours in (True, False) if round_ % 2 else (False, True):
                if ours:
                    swept.append(trials_of_a_worker(worker, place / "prepared", epochs, trials))
                else:
                    asked.append(through_the_task(task, place / "prepared", epochs))
    of_trials = [each for found in swept for each in found]
    trial = {key: statistics.median(each[key] for each in of_trials) for key in ("besides", "working")}
    task_ = {key: statistics.median(each[key] for each in asked) for key in asked[0]}
    first = statistics.median(found[0]["first"] for found in swept)
    ratios = {"ratio": trial["besides"] / task_["besides"], "ratio_stage": trial["besides"] / task_["stage"]}
    rows = {"trial of a worker": trial | {"first": first} | ratios, "the task train": task_}
    return Table(f"{len(of_trials)} trials and {rounds} runs of the task, {epochs} epochs, medians", COSTS, rows)


@benchmark
@part_option(("simulated", "real"))
def main(quick: bool, parts: tuple[str, ...]) -> Iterator[Table]:
    """Measure the quality of a sweep's decisions, and the overhead of a trial besides its steps."""
    if "simulated" in parts:
        yield from simulated(*((1, 12) if quick else (SEEDS, TRIALS)))
    if "real" in parts:
        yield real(*((1, 2, 1) if quick else (3, 6, 20)))


if __name__ == "__main__":
    main()
