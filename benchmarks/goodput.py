"""How much of a run on spot machines is useful: four preemptions in 1,600 steps, after Ray's nightly test.

    python benchmarks/goodput.py [--quick] [--json FILE]

Ray (release/train_tests, 8 workers, 4 preemptions, 1,600 steps) reports 75.6 % useful steps with a checkpoint every 400
steps and 94.6 % with a checkpoint on notice. Here two ranks of ``slipstream.train.run`` train a model whose steps take
at least 50 ms; the faults come at times drawn from a seed, which the trainer cannot see. *periodic* saves every 400
steps and is killed without notice; *auto* chooses its interval, told a mean time between failures of 400 steps, and is
killed without notice; *notice* saves every 400 steps and gets SIGTERM first. Executed steps are counted by the model
and times from outside; start-up is what passes until an attempt's first step has begun. The processes are forked from
one that has imported torch, which takes seconds otherwise.
"""

from __future__ import annotations

import io
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.command import benchmark
from harness.processes import FRESH, alone
from harness.table import Column, Table
from harness.turns import Figures
from slipstream import logs
from slipstream.artifacts.prepared.data import PreparedData, Signature
from slipstream.models.config import ModelConfig
from slipstream.prepare.config import DataConfig
from slipstream.prepare.engine import prepare
from slipstream.storage import storage_for
from slipstream.train.config import TrainingConfig
from slipstream.train.fault_tolerance.goodput import STALL, STEPS, read_attempts
from slipstream.train.loop.probe import ROWS

WORLD = 2
SAVE_EVERY = STEPS_BETWEEN_FAILURES = 400
STEPS_PER_EPOCH = 20
MODES = ("periodic", "auto", "notice")


@dataclass(frozen=True)
class Plan:
    """A run of ``steps`` steps, each of at least ``step_s`` seconds, with ``faults`` on the way; its files lie in
    ``place``."""

    place: Path
    steps: int
    step_s: float
    faults: int

    def saving(self, mode: str) -> dict[str, Any]:
        if mode == "auto":
            return {"mean_time_between_failures": STEPS_BETWEEN_FAILURES * self.step_s}
        return {"checkpoint_every": SAVE_EVERY}


class Steady(nn.Module):
    """A network whose training steps take ``step_s``, and which notes in ``counter`` each that rank 0 begins."""

    def __init__(self, pixels: int, outputs: int, counter: str, step_s: float) -> None:
        super().__init__()
        self.counter, self.step_s = Path(counter), step_s
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, 512), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, outputs)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        # Smaller are the trainer's passes before the first step, which tell about the model and settle the buckets.
        if self.training and len(inputs) > ROWS:
            if dist.get_rank() == 0:
                with self.counter.open("ab", buffering=0) as executed:
                    executed.write(b".")
            time.sleep(self.step_s)
        return self.layers(inputs.float())


def build(signature: Signature, counter: str, step_s: float) -> nn.Module:
    """The factory that the trainer is told of."""
    return Steady(math.prod(signature.inputs[0].shape), signature.outputs, counter, step_s)


def rank_main(rank: int, port: int, plan: Plan, mode: str) -> None:
    """One rank of one attempt."""
    from slipstream.train.fault_tolerance.guard import Preempted
    from slipstream.train.run import run
    from slipstream.train.setup import TrainingRequest

    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # As under torch elastic, whose agent holds the store.
    where["TORCHELASTIC_USE_AGENT_STORE"] = True
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    place = plan.place
    rows = sum(PreparedData.open(place / "prepared").segment_rows("train"))
    logs.configure("error")
    with redirect_stdout(io.StringIO()):
        try:
            request = TrainingRequest(
                prepared=place / "prepared",
                model=ModelConfig("goodput:build", {"counter": f"{place}/{mode}.executed", "step_s": plan.step_s}),
                training=TrainingConfig(
                    batch_size=math.ceil(rows / STEPS_PER_EPOCH),
                    epochs=plan.steps // STEPS_PER_EPOCH,
                    patience=0,
                    **plan.saving(mode),
                ),
                directory=place / f"{mode}.model",
                home=f"{place}/{mode}.home",
                made_by={},
            )
            run(request)
        except Preempted:
            os._exit(1)


def attempt(plan: Plan, mode: str, fault_at: float | None) -> tuple[bool, float, float]:
    """Run the ranks to the end or, ``fault_at`` seconds after the first step, to the fault.

    Whether they finished, and the seconds until the first step had begun and until all processes had ended.
    """
    counter = plan.place / f"{mode}.executed"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [FRESH.Process(target=rank_main, args=(rank, store.port, plan, mode), daemon=True) for rank in range(WORLD)]
    before = counter.stat().st_size if counter.exists() else 0
    started = time.perf_counter()
    for process in ranks:
        process.start()
    while not counter.exists() or counter.stat().st_size == before:
        assert all(process.is_alive() for process in ranks), "a rank ended before its first step"
        time.sleep(0.01)
    start_s = time.perf_counter() - started
    if fault_at is not None:
        ranks[0].join(fault_at)
        victim = ranks[-1]
        if victim.is_alive():
            os.kill(victim.pid or 0, signal.SIGTERM if mode == "notice" else signal.SIGKILL)
            victim.join()
            if mode != "notice":
                ranks[0].kill()
    for process in ranks:
        process.join()
    return all(process.exitcode == 0 for process in ranks), start_s, time.perf_counter() - started


def measure(plan: Plan, mode: str, seed: int) -> Figures:
    """One run to its end: what of it was useful."""
    draw = random.Random(seed)
    # Exponential gaps; capped so that all faults fall into the run.
    mean = plan.steps / (plan.faults + 1) * plan.step_s
    gaps = [min(draw.expovariate(1 / mean), 1.2 * mean) for _ in range(plan.faults)]
    attempts = [attempt(plan, mode, gap) for gap in [*gaps, None]]
    assert [finished for finished, _, _ in attempts] == [False] * plan.faults + [True]
    pages = read_attempts(storage_for(f"{plan.place}/{mode}.home"))
    # A killed attempt's page is some seconds old; what is on it belongs together.
    stepping = sum(page.seconds[STEPS] for page in pages)
    executed = (plan.place / f"{mode}.executed").stat().st_size
    useful_s = plan.steps * stepping / sum(page.executed for page in pages)
    wall, start = sum(wall for _, _, wall in attempts), sum(start for _, start, _ in attempts)
    return {
        "executed": executed,
        "useful_steps": plan.steps / executed,
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
@click.option("--steps", default=1600, show_default=True, help=f"A multiple of {STEPS_PER_EPOCH}.")
@click.option("--seed", default=0, show_default=True, help="Of the times of the faults.")
def main(quick: bool, steps: int, seed: int) -> Iterator[Table]:
    """What of a run is useful, of three ways of saving."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        plan = Plan(place, 20, 0.03, faults=1) if quick else Plan(place, steps, 0.05, faults=4)
        prepare(place / "prepared", "", "", DataConfig(), {})
        alone(len, "")  # starts the server that the ranks are forked from
        rows = {}
        for mode in MODES:
            rows[mode] = measure(plan, mode, seed)
            click.echo(f"  {mode}: {rows[mode]['useful_steps']:.1%} useful", err=True)
    step = f"{plan.steps} steps of at least {plan.step_s * 1e3:.0f} ms"
    yield Table(f"{WORLD} ranks, {step}, {plan.faults} faults, seed {seed}", COLUMNS, rows)


if __name__ == "__main__":
    main()
