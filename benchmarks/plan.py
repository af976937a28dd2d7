"""Accuracy of ``slipstream plan`` for the duration of a training that is killed repeatedly.

    python benchmarks/plan.py [OPTIONS]

Two ranks of ``slipstream.pipeline.train.run`` train a model whose steps take at least 30 ms. Undisturbed trainings
alternate with trainings that are killed (SIGKILL) at times drawn from a seed until they finish. As with ``--measured``,
the plan reads the figures of the undisturbed trainings before and after the killed one. It predicts the duration for
the observed uptimes and waits (*told*), and an interval for 90 of 100 trainings from the rate of kills and the waits
only. The actual duration is from the start of the first attempt to the end of the last, as in a report.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np

from harness.command import benchmark
from harness.preempted import WORLD, Fault, Job, attempt
from harness.processes import alone
from harness.table import Column, Table
from slipstream.operations.plan.capacity import PodCapacity
from slipstream.operations.plan.decide import SimulatedRange, planned_job
from slipstream.operations.plan.estimate import estimate_work_time
from slipstream.operations.plan.measured import MeasuredTraining, measured_training
from slipstream.operations.plan.money import HOUR_S
from slipstream.operations.plan.simulation import RUNS, PreemptionRules, simulate_trainings
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.results.ledger import read_figures
from slipstream.shared.source.config import DataConfig

STEP_S = 0.03
#: Maximum number of kills of a training.
MOST = 40


class ObservedCapacity:
    """Preemption trace of observed hours with (``up``) and without processes (``wait``), undisturbed afterwards."""

    def __init__(self, ups: Sequence[float], waits: Sequence[float]) -> None:
        self._ups, self._waits = iter(ups), iter(waits)

    def up(self, chosen: np.ndarray) -> np.ndarray:
        return np.full(len(chosen), next(self._ups, np.inf))

    def wait(self, chosen: np.ndarray) -> np.ndarray:
        return np.full(len(chosen), next(self._waits, 0.0))


@dataclass(frozen=True)
class Killed:
    """Finished training: wall seconds, uptimes before every kill, and waits after every kill, in seconds."""

    clock_s: float
    ups: list[float]
    waits: list[float]


def killed(job: Job, seed: int, mean_s: float) -> Killed:
    """Run a training to its end, killing every attempt ``mean_s`` seconds after its start on average."""
    draw, at = np.random.default_rng(seed), list[float]()
    while True:
        assert len(at) < MOST, "killed too often to get on"
        started = time.time()
        ended = attempt(job, Fault(draw.exponential(mean_s), warned=False))
        if ended.finished:
            break
        at.append(started + ended.fault_s)
    pages = job.pages()
    began = [page.began_at for page in pages]
    # An attempt that was killed before its first record counts as waiting.
    last = [max([moment for moment in at if moment < following], default=began[0]) for following in began[1:]]
    ups = [max(0.0, moment - start) for start, moment in zip(began, last, strict=False)]
    waits = [following - moment for moment, following in zip(last, began[1:], strict=True)]
    return Killed(pages[-1].began_at + pages[-1].wall - began[0], ups, waits)


def undisturbed(place: Path, name: str, steps: int, saving: dict[str, float]) -> MeasuredTraining:
    job = Job(place, name, steps, STEP_S, saving)
    attempt(job, None)
    return measured_training(name, read_figures(job.model))


def compare(its: Killed, around: list[MeasuredTraining], mean_s: float, seed: int) -> dict[str, float | str]:
    planned, time_s = around[0], estimate_work_time(around[0], around)
    job = planned_job(planned, time_s.seconds, mean_s / HOUR_S)
    told = ObservedCapacity([up / HOUR_S for up in its.ups], [wait / HOUR_S for wait in its.waits])
    random = np.random.default_rng(seed)
    same = float(simulate_trainings(job, told, PreemptionRules(), random, np.ones(1)).hours[0] * HOUR_S)
    waits = tuple(wait / HOUR_S for wait in its.waits) or (0.0,)
    weather = PodCapacity("", rate=HOUR_S / mean_s, waits=waits).weather(1, RUNS, random)
    forecast = SimulatedRange.of(
        simulate_trainings(job, weather, PreemptionRules(), random, time_s.factors(random, RUNS)).hours * HOUR_S
    )
    return {
        "kills": len(its.ups),
        "took_s": its.clock_s,
        "told_s": same,
        "ratio": its.clock_s / same,
        "off": abs(its.clock_s / same - 1),
        "low_s": forecast.low,
        "high_s": forecast.high,
        "held": "yes" if forecast.low <= its.clock_s <= forecast.high else "no",
    }


COLUMNS = (
    Column("kills", "kills", "{:.0f}"),
    Column("took s", "took_s"),
    Column("told s", "told_s"),
    Column("took/told", "ratio", "{:.2f}"),
    Column("5 %", "low_s"),
    Column("95 %", "high_s"),
    Column("held", "held"),
)


@benchmark
@click.option("--runs", default=6, show_default=True, help="Killed trainings.")
def main(quick: bool, runs: int) -> Iterator[Table]:
    """Compare planned and actual durations of trainings that are killed."""
    steps, runs, mean_s = (40, 1, 3.0) if quick else (400, runs, 8.0)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        prepare(place / "prepared", "", "", DataConfig(), {})
        alone(len, "")  # starts the fork server of the ranks
        rows, saving = {}, {"mean_time_between_failures": mean_s}
        before = undisturbed(place, "undisturbed", steps, saving)
        for seed in range(runs):
            its = killed(Job(place, f"killed-{seed}", steps, STEP_S, saving), seed, mean_s)
            after = before if quick else undisturbed(place, f"undisturbed-{seed}", steps, saving)
            rows[f"seed {seed}"] = compare(its, [before, after], mean_s, seed)
            click.echo(f"  seed {seed}: {len(its.ups)} kills", err=True)
            before = after
    off = median(float(row["off"]) for row in rows.values())
    held = sum(row["held"] == "yes" for row in rows.values())
    title = f"{WORLD} ranks, {steps} steps of at least {STEP_S * 1e3:.0f} ms, killed each {mean_s:.1f} s on average"
    remark = f"off by {off:.1%} in the median; the interval that knows the rate alone held {held} of {len(rows)}"
    yield Table(title, COLUMNS, rows, (remark,))


if __name__ == "__main__":
    main()
