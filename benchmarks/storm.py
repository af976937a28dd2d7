"""Accuracy of ``slipstream rehearse PROFILE --storm``: its preemption simulation compared with real trainings.

    python benchmarks/storm.py [OPTIONS]

Two ranks of ``slipstream.pipeline.train.run`` train a model whose steps take at least 30 ms. Every run is preempted at
the times of its own Poisson process until it finishes, by SIGKILL (*killed*) or, without earlier notice, by SIGTERM
(*warned*). The simulation gets the same preemption trace, and the measured times of a step, a start and a save. The
remaining difference is the simulation's error; its mean has Student's 95 % interval over the runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import click
import numpy as np
from scipy import stats

from harness.command import benchmark
from harness.preempted import WORLD, Ended, Fault, Job, attempt
from harness.processes import alone
from harness.table import Column, Table
from slipstream.operations.doctor.package import measured_save
from slipstream.operations.plan.money import HOUR_S
from slipstream.operations.plan.simulation import SimulatedTrainings, TrainingPace, simulate_constant_rate
from slipstream.operations.proofs.turns import Figures
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.results.ledger import STEPS
from slipstream.shared.artifacts.results.training import read_attempt
from slipstream.shared.source.config import DataConfig

STEP_S = 0.03
SAVE_EVERY = 25
#: Maximum number of preemptions of a training.
MOST = 40


@dataclass(frozen=True)
class Run:
    attempts: list[Ended]
    executed: int
    step_s: float
    #: Seconds from the snapshot of a checkpoint to its publication.
    save_s: float


def run(job: Job, seed: int, mean_s: float, warned: bool, save_s: float) -> Run:
    """Train to the end, with a preemption every ``mean_s`` seconds on average.

    If the last attempt had too few steps to save anything, ``save_s`` is taken as the seconds of a save.
    """
    draw, attempts = np.random.default_rng(seed), list[Ended]()
    while not attempts or not attempts[-1].finished:
        assert len(attempts) < MOST, "preempted too often to get on"
        attempts.append(attempt(job, Fault(draw.exponential(mean_s), warned)))
    pages = job.pages()
    executed = sum(page.executed for page in pages)
    step_s = sum(page.seconds[STEPS] for page in pages) / executed
    return Run(attempts, job.executed, step_s, read_attempt(job.model).save_seconds or save_s)


def predicted(seed: int, mean_s: float, pace: TrainingPace, *, warned: bool) -> SimulatedTrainings:
    """Simulate a training under the preemption trace of ``seed``."""
    return simulate_constant_rate(np.random.default_rng(seed), HOUR_S / mean_s, pace, warned=warned, trainings=1)


def compare(runs: list[Run], steps: int, mean_s: float, *, warned: bool) -> Figures:
    step_s = median(run.step_s for run in runs)
    ended = [each for run in runs for each in run.attempts]
    struck = [each for each in ended if not each.finished]
    starts = [each.start_s for each in ended if each.start_s < each.fault_s]
    save_s = median(run.save_s for run in runs)
    if warned and struck:  # the last save and the shutdown
        save_s = median(each.wall_s - each.fault_s for each in struck)
    pace = TrainingPace(steps * step_s / HOUR_S, SAVE_EVERY * step_s, save_s, median(starts))
    told = [predicted(seed, mean_s, pace, warned=warned) for seed in range(len(runs))]
    lost = [run.executed / steps - 1 for run in runs]
    clock = [
        sum(each.fault_s if not each.finished and not warned else each.wall_s for each in run.attempts) for run in runs
    ]
    off = np.array(lost) - np.array([one.lost[0] / pace.hours for one in told])
    half = float(stats.t.ppf(0.975, len(off) - 1) * off.std(ddof=1) / np.sqrt(len(off))) if len(off) > 1 else 0.0
    return {
        "runs": len(runs),
        "preempted": fmean(len(run.attempts) - 1 for run in runs),
        "preempted_told": fmean(one.retries[0] for one in told),
        "lost": fmean(lost),
        "lost_told": fmean(one.lost[0] / pace.hours for one in told),
        "off": abs(float(off.mean())),
        "half": half,
        "clock_s": fmean(clock),
        "clock_told": fmean(one.clock[0] * HOUR_S for one in told),
        "step_s": step_s,
        "start_s": pace.start_s,
        "save_s": pace.save_s,
    }


COLUMNS = (
    Column("runs", "runs", "{:.0f}"),
    Column("preempted", "preempted", "{:.2f}"),
    Column("told", "preempted_told", "{:.2f}"),
    Column("steps lost", "lost", "{:.2%}"),
    Column("told", "lost_told", "{:.2%}"),
    Column("apart", "off", "{:.2%}"),
    Column("+-", "half", "{:.2%}"),
    Column("clock s", "clock_s", "{:.1f}"),
    Column("told", "clock_told", "{:.1f}"),
    Column("step ms", "step_s", "{:.1f}", 1e-3),
    Column("start s", "start_s", "{:.2f}"),
    Column("save s", "save_s", "{:.2f}"),
)


@benchmark
@click.option("--runs", default=25, show_default=True, help="Runs of every kind.")
def main(quick: bool, runs: int) -> Iterator[Table]:
    """Compare the preemption simulation with trainings that are preempted."""
    steps, runs = (40, 1) if quick else (200, runs)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        prepare(place / "prepared", "", "", DataConfig(), {})
        alone(len, "")  # starts the fork server of the ranks
        alone_job = Job(place, "undisturbed", steps, STEP_S, {"checkpoint_every": SAVE_EVERY})
        mean_s, rows = attempt(alone_job, None).wall_s, {}
        save_s = measured_save(alone_job.model).seconds
        for kind in ("killed", "warned"):
            found = []
            for seed in range(runs):
                job = Job(place, f"{kind}-{seed}", steps, STEP_S, {"checkpoint_every": SAVE_EVERY})
                found.append(run(job, seed, mean_s, kind == "warned", save_s))
                click.echo(f"  {kind} {seed}: {len(found[-1].attempts) - 1} preemptions", err=True)
            rows[kind] = compare(found, steps, mean_s, warned=kind == "warned")
    title = f"{WORLD} ranks, {steps} steps, a save every {SAVE_EVERY}, a preemption every {mean_s:.1f} s on average"
    yield Table(title, COLUMNS, rows)


if __name__ == "__main__":
    main()
