"""Goodput of a run on spot machines: four preemptions in 1,600 steps, modelled on Ray's nightly test.

    python benchmarks/goodput.py [OPTIONS]

Ray (release/train_tests, 8 workers) reports 75.6 % useful steps with a checkpoint every 400 steps and 94.6 % with a
checkpoint on notice. Here two ranks of ``slipstream.pipeline.train.run`` train a model whose steps take at least 50 ms.
The faults come at times drawn from a seed and unknown to the trainer. *periodic* saves every 400 steps and is killed
without notice. *auto* chooses its interval from a mean time between failures of 400 steps, and is killed without
notice. *notice* saves every 400 steps and is stopped by SIGTERM, at which it saves. Start-up is the time until an
attempt's first step starts.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from harness.command import benchmark
from harness.preempted import STEPS_PER_EPOCH, WORLD, Fault, Job, attempt
from harness.processes import alone
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.results.ledger import STALL, STEPS
from slipstream.shared.source.config import DataConfig

SAVE_EVERY = STEPS_BETWEEN_FAILURES = 400
MODES = ("periodic", "auto", "notice")


@dataclass(frozen=True)
class Plan:
    """Training of ``steps`` steps of at least ``step_s`` seconds with ``faults`` preemptions, in ``place``."""

    place: Path
    steps: int
    step_s: float
    faults: int

    def saving(self, mode: str) -> dict[str, Any]:
        if mode == "auto":
            return {"mean_time_between_failures": STEPS_BETWEEN_FAILURES * self.step_s}
        return {"checkpoint_every": SAVE_EVERY}


def measure(plan: Plan, mode: str, seed: int) -> Figures:
    """Run one training to its end and return its figures; ``apart`` is the goodput without start-up."""
    draw = random.Random(seed)
    # Exponential gaps; capped so that all faults fall into the run.
    mean = plan.steps / (plan.faults + 1) * plan.step_s
    gaps = [min(draw.expovariate(1 / mean), 1.2 * mean) for _ in range(plan.faults)]
    job = Job(plan.place, mode, plan.steps, plan.step_s, plan.saving(mode))
    faults = [Fault(gap, warned=mode == "notice", from_first_step=True) for gap in gaps]
    attempts = [attempt(job, fault) for fault in [*faults, None]]
    assert [each.finished for each in attempts] == [False] * plan.faults + [True]
    pages = job.pages()
    stepping = sum(page.seconds[STEPS] for page in pages)
    useful_s = plan.steps * stepping / sum(page.executed for page in pages)
    wall, start = sum(each.wall_s for each in attempts), sum(each.start_s for each in attempts)
    return {
        "executed": job.executed,
        "useful_steps": plan.steps / job.executed,
        "stall": sum(page.seconds[STALL] for page in pages) / stepping,
        "goodput": useful_s / wall,
        "apart": useful_s / (wall - start),
        "start_s": start / len(attempts),
    }


COLUMNS = (
    Column("executed", "executed", "{:.0f}"),
    Column("useful steps", "useful_steps", "{:.1%}"),
    Column("stall/steps", "stall", "{:.2%}"),
    Column("goodput", "goodput", "{:.1%}"),
    Column("start-up apart", "apart", "{:.1%}"),
    Column("start-up s", "start_s", "{:.2f}"),
)


@benchmark
@click.option("--steps", default=1600, show_default=True, help=f"Number of steps, a multiple of {STEPS_PER_EPOCH}.")
@click.option("--seed", default=0, show_default=True, help="Seed of the faults' times.")
def main(quick: bool, steps: int, seed: int) -> Iterator[Table]:
    """Measure the goodput of the three modes of saving."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        plan = Plan(place, 20, 0.03, faults=1) if quick else Plan(place, steps, 0.05, faults=4)
        prepare(place / "prepared", "", "", DataConfig(), {})
        alone(len, "")  # starts the fork server of the ranks
        rows = {}
        for mode in MODES:
            rows[mode] = measure(plan, mode, seed)
            click.echo(f"  {mode}: {rows[mode]['useful_steps']:.1%} useful", err=True)
    step = f"{plan.steps} steps of at least {plan.step_s * 1e3:.0f} ms"
    yield Table(f"{WORLD} ranks, {step}, {plan.faults} faults, seed {seed}", COLUMNS, rows)


if __name__ == "__main__":
    main()
