"""What surviving costs while nothing goes wrong: the trainer's loop with everything on, beside the same loop without.

    python benchmarks/overhead.py [--quick] [--json FILE]

*Everything* is the guard's questions, the watcher, the ledger, and a checkpoint every second or two; the stall of its
snapshot is counted apart. *Without* is the same ``train_loop`` on the same model and process group with a guard and a
ledger that do nothing. Two ranks take turns with both, about 100 steps of 20 ms each, in an order that alternates;
the figure is the median of the paired ratios with its distribution-free 95 % interval. On *a device* the host waits
for the step, as with a GPU; on *the host* every core computes, so that what is written beside the steps shows most.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from scipy.stats import binom
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tasks.artifacts.prepared import PreparedData
from tasks.distributed.process_group import Group
from tasks.models.factory import Predictor
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import prepare
from tasks.train.checkpoint import Checkpoints, Retention
from tasks.train.config import TrainingConfig
from tasks.train.loop.state import Progress, TrainingState, weights_of
from tasks.train.loop.step import make_optimizer, warm_up_ddp_buckets
from tasks.train.loop.train_loop import checkpoint_state, train_loop
from tasks.train.survival.checkpoint_interval import Interval
from tasks.train.survival.goodput import STALL, GoodputRecorder
from tasks.train.survival.guard import Guard
from tasks.train.survival.notices import Watcher

WORLD = 2
STEP_S = 0.02
STEPS = 100
SAVE_EVERY = 50
WIDTH = 256
WORKS = ("device", "host")


class Steady(nn.Module):
    """A network of about 4 MB of state whose training steps take at least :data:`STEP_S`."""

    def __init__(self, pixels: int, outputs: int, work: str) -> None:
        super().__init__()
        self.work = work
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, WIDTH),
            *(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
            nn.Linear(WIDTH, outputs),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            busy(STEP_S) if self.work == "host" else time.sleep(STEP_S)
        return self.layers(inputs.float())


def busy(seconds: float) -> None:
    """As much computing as takes this long on an idle core; the same amount every time."""
    matrix = torch.ones(128, 128)
    for _ in range(round(seconds / multiplication_s())):
        matrix @ matrix


def multiplication_s(known: list[float] = []) -> float:  # noqa: B006  (measured once per process)
    if not known:
        matrix, times = torch.ones(128, 128), []
        for _ in range(400):
            begun = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - begun)
        known.append(float(np.median(times)))
    return known[0]


class NoGoodputRecorder(GoodputRecorder):
    """Keeps nothing."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        yield

    def add(self, name: str, seconds: float) -> None:
        pass

    def step(self, done: int) -> None:
        pass


class NoGuard(Guard):
    """Neither asks nor saves."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def step(self) -> Iterator[None]:
        yield

    def after_step(self, step: int, capture: Any) -> None:
        pass

    def evaluating(self, batches: Iterator[Any], rounds: int, step: int, capture: Any) -> Iterator[Any]:
        return batches

    def waiting(self) -> None:
        pass


class Bench:
    """One rank's trainer, which goes on from turn to turn."""

    def __init__(self, data: PreparedData, work: str, home: str) -> None:
        self.data = data
        rows = sum(data.segment_rows("train"))
        self.training = TrainingConfig(batch_size=-(-rows // STEPS), evaluate_every=10**6, patience=0)
        self.group = Group(dist.get_rank(), WORLD, torch.device("cpu"), "gloo")
        torch.manual_seed(0)
        pixels = int(np.prod(data.signature.inputs[0].shape))
        predictor = Predictor(data.signature, Steady(pixels, data.signature.outputs, work))
        self.state = TrainingState(
            predictor,
            make_optimizer(predictor, self.training),
            torch.amp.GradScaler("cpu", enabled=False),
            weights_of(predictor),
            Progress(),
        )
        self.ddp = DistributedDataParallel(predictor)
        warm_up_ddp_buckets(self.ddp, self.state, self.group)
        self.checkpoints = Checkpoints(
            home, model=predictor, optimizer=self.state.optimizer, identity={}, retention=Retention(last=1)
        )
        self.checkpoints.prepare(checkpoint_state(self.state))
        self.turns = 0

    def turn(self, guarded: bool, watcher: Watcher) -> tuple[float, float]:
        """Seconds of :data:`STEPS` steps without their stalls, and of the stalls."""
        self.turns += 1
        # The course of training grows from turn to turn; what a checkpoint holds is to stay the same.
        self.state.progress.steps.clear()
        self.state.progress.evaluations.clear()
        guard: Guard = NoGuard()
        ledger: GoodputRecorder = NoGoodputRecorder()
        if guarded:
            home, rank = self.checkpoints.home, self.group.rank
            ledger = GoodputRecorder(home, self.turns, WORLD, writes=rank == 0, started=time.perf_counter())
            guard = Guard(self.checkpoints, Interval(steps=SAVE_EVERY), watcher, ledger)
            guard.begin(self.state.progress.step)
        training = replace(self.training, epochs=self.turns)
        dist.barrier()
        begun = time.perf_counter()
        train_loop(self.ddp, self.state, self.data, training, self.group, "fp32", guard, ledger)
        seconds = time.perf_counter() - begun
        stall = ledger.record.seconds[STALL] if guarded else 0.0
        if guarded:
            self.checkpoints.finish()
            guard.close()
        return seconds - stall, stall


def rank_main(rank: int, scratch: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=WORLD)
    data = PreparedData.open(Path(scratch) / "prepared")
    figures: dict[str, list[dict[str, float]]] = {}
    with Watcher([]) as watcher, redirect_stdout(io.StringIO()):
        for work in WORKS:
            bench, figures[work] = Bench(data, work, f"{scratch}/{work}"), []
            bench.turn(True, watcher)  # unmeasured: the first save, the first pages of memory
            for round_ in range(rounds):
                taken = {}
                for guarded in (True, False) if round_ % 2 else (False, True):
                    taken[guarded] = bench.turn(guarded, watcher)
                (with_s, stall_s), (without_s, _) = taken[True], taken[False]
                figures[work].append(
                    {"ratio": with_s / without_s, "stall": stall_s / with_s, "step": without_s / STEPS}
                )
    if rank == 0:
        (Path(scratch) / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of what a step costs more, in per cent, and an interval that holds it in 95 of 100 cases."""
    more = sorted(100 * (round_["ratio"] - 1) for round_ in rounds)
    outside = int(binom.ppf(0.025, len(more), 0.5))
    return {
        "step_ms": 1e3 * float(np.median([round_["step"] for round_ in rounds])),
        "more": float(np.median(more)),
        "low": more[max(0, outside - 1)],
        "high": more[min(len(more) - 1, len(more) - outside)],
        "stall": 100 * float(np.median([round_["stall"] for round_ in rounds])),
    }


@click.command()
@click.option("--rounds", default=16, help="Pairs of turns for each kind of work.")
@click.option("--quick", is_flag=True, help="Few rounds: whether it runs, not what it costs.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(rounds: int, quick: bool, json_file: Path | None) -> None:
    """Print what a step costs more with everything on."""
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch) / "prepared", "", "", DataConfig(), {}, 1)
        torch.multiprocessing.spawn(rank_main, args=(scratch, 3 if quick else rounds), nprocs=WORLD)
        figures = json.loads((Path(scratch) / "figures.json").read_text())
    rows = {work: summary(figures[work]) for work in WORKS}
    print(f"{WORLD} ranks, turns of {STEPS} steps, a checkpoint every {SAVE_EVERY}, {len(figures['host'])} pairs")
    print(f"{'steps on':<10}{'step ms':>9}{'more':>9}{'95 % interval':>20}{'stalls, apart':>15}")
    for work, row in rows.items():
        interval = f"{row['low']:+.2f} to {row['high']:+.2f} %"
        print(f"{work:<10}{row['step_ms']:>9.1f}{row['more']:>+8.2f}%{interval:>20}{row['stall']:>14.2f}%")
    if json_file:
        json_file.write_text(json.dumps({"world": WORLD, "rows": rows, "rounds": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
