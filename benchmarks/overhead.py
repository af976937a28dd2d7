"""What surviving costs while nothing goes wrong: the trainer's loop with everything on, beside the same loop without.

    python benchmarks/overhead.py [--quick] [--json FILE]

*Everything* is the guard's questions, the watcher, the goodput record, and a checkpoint every second or two; the stall
of its snapshot is counted apart. *Without* is the same ``train_loop`` on the same model and process group with a guard
and a goodput record that do nothing. Two ranks take turns with both, about 100 steps of 20 ms each, in an order that
alternates; the figure is the median of the paired ratios with its distribution-free 95 % interval. On *a device* the
host waits for the step, as with a GPU; on *the host* every core computes, so that what is written beside the steps
shows most.
"""

from __future__ import annotations

import io
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
from torch import Tensor, nn

from harness.command import benchmark
from harness.processes import on_ranks
from harness.table import Column, Table
from harness.turns import Figures, interval_of_median, medians
from slipstream.artifacts.prepared.data import PreparedData
from slipstream.distributed.process_group import Group
from slipstream.models.factory import Predictor
from slipstream.prepare.config import DataConfig
from slipstream.prepare.engine import prepare
from slipstream.train.checkpoint.home import Retention
from slipstream.train.checkpoint.manager import Checkpoints
from slipstream.train.checkpoint.restore import ResumePolicy
from slipstream.train.checkpoint.state import AppState
from slipstream.train.config import TrainingConfig
from slipstream.train.fault_tolerance.consensus import Interval
from slipstream.train.fault_tolerance.goodput import STALL, GoodputRecorder
from slipstream.train.fault_tolerance.guard import Guard
from slipstream.train.fault_tolerance.notices import Watcher
from slipstream.train.loop.optimizer import make_optimizer
from slipstream.train.loop.precision import LossScaler
from slipstream.train.loop.probe import Traits
from slipstream.train.loop.state import Progress, TrainingState, weights_of
from slipstream.train.loop.train_loop import TrainLoop
from slipstream.train.parallel.replicas import replicate
from slipstream.train.telemetry.step_times import StepTimes

WORLD = 2
STEP_S = 0.02
#: In a turn.
SAVES = 2
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

    def event(self, kind: str) -> None:
        pass


class NoGuard(Guard):
    """Neither asks nor saves."""

    def __init__(self) -> None:
        self.recorder, self.times = NoGoodputRecorder(), StepTimes(0, 1)

    def before_step(self) -> Any:
        pass

    def enqueued(self, start: Any, waited: float = 0.0) -> Any:
        pass

    def finished(self, step: int, timing: Any) -> None:
        pass

    def after_step(self, step: int, capture: Any) -> None:
        pass

    def evaluating(self, batches: Iterator[Any], rounds: int, step: int, capture: Any) -> Iterator[Any]:
        return batches

    def waiting(self) -> None:
        pass

    def wait_for_copy(self) -> None:
        pass


class Bench:
    """One rank's trainer, which goes on from turn to turn."""

    def __init__(self, data: PreparedData, work: str, home: str, steps: int) -> None:
        self.data, self.steps = data, steps
        rows = sum(data.segment_rows("train"))
        self.training = TrainingConfig(batch_size=-(-rows // steps), evaluate_every=10**6, patience=0)
        self.group = Group(dist.get_rank(), WORLD, torch.device("cpu"), "gloo")
        torch.manual_seed(0)
        pixels = int(np.prod(data.signature.inputs[0].shape))
        predictor = Predictor(data.signature, Steady(pixels, data.signature.outputs, work))
        self.state = TrainingState(
            replicate(predictor, Traits(), self.group),
            make_optimizer(predictor, self.training),
            LossScaler(self.group.device, enabled=False),
            weights_of(predictor),
            Progress(),
        )
        self.checkpoints = Checkpoints(
            home, AppState(predictor, self.state.optimizer), ResumePolicy({}), retention=Retention(last=1)
        )
        self.checkpoints.prepare(self.state.to_save())
        self.turns = 0

    def turn(self, guarded: bool, watcher: Watcher) -> tuple[float, float]:
        """Seconds of a turn's steps without their stalls, and of the stalls."""
        self.turns += 1
        # The course of training grows from turn to turn; what a checkpoint holds is to stay the same.
        self.state.progress.steps.clear()
        self.state.progress.evaluations.clear()
        guard: Guard = NoGuard()
        if guarded:
            home, attempt = self.checkpoints.home, self.checkpoints.attempt
            writes, started = self.group.rank == 0, time.perf_counter()
            recorder = GoodputRecorder(home, attempt, WORLD, writes=writes, started=started)
            guard = Guard(self.checkpoints, Interval(steps=self.steps // SAVES), watcher, recorder)
            guard.begin(self.state.progress.step)
        training = replace(self.training, epochs=self.turns)
        dist.barrier()
        begun = time.perf_counter()
        loop = TrainLoop(self.state, self.data, training, self.group, "fp32", guard)
        loop.run(lambda *_: None)
        seconds = time.perf_counter() - begun
        stall = guard.recorder.record.seconds[STALL] if guarded else 0.0
        if guarded:
            self.checkpoints.finish()
            guard.close()
        return seconds - stall, stall


def measure(scratch: str, rounds: int, steps: int) -> dict[str, list[Figures]]:
    """The pairs of turns of each kind of work, on each rank."""
    data = PreparedData.open(Path(scratch) / "prepared")
    found: dict[str, list[Figures]] = {}
    with Watcher([], grace_s=25) as watcher, redirect_stdout(io.StringIO()):
        for work in WORKS:
            bench, found[work] = Bench(data, work, f"{scratch}/{work}", steps), []
            bench.turn(True, watcher)  # unmeasured: the first save, the first pages of memory
            for round_ in range(rounds):
                taken = {}
                for guarded in (True, False) if round_ % 2 else (False, True):
                    taken[guarded] = bench.turn(guarded, watcher)
                (with_s, stall_s), (without_s, _) = taken[True], taken[False]
                found[work].append({"ratio": with_s / without_s, "stall": stall_s / with_s, "step": without_s / steps})
    return found


def summary(rounds: list[Figures]) -> Figures:
    """The median of a step's time over that without, and an interval that holds it in 95 of 100 cases."""
    ratio, low, high = interval_of_median([round_["ratio"] for round_ in rounds])
    rest = medians(rounds)
    return {
        "step_ms": 1e3 * rest["step"],
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "stall": rest["stall"],
    }


COLUMNS = (
    Column("step ms", "step_ms"),
    Column("with/without", "ratio", "{:.4f}"),
    Column("95 % from", "ratio_low", "{:.4f}"),
    Column("to", "ratio_high", "{:.4f}"),
    Column("stalls, apart", "stall", "{:.2%}"),
)


@benchmark
@click.option("--rounds", default=16, show_default=True, help="Pairs of turns for each kind of work.")
def main(quick: bool, rounds: int) -> Iterator[Table]:
    """What a step costs with everything on, over what it costs without."""
    rounds, steps = (1, 4) if quick else (rounds, 100)
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch) / "prepared", "", "", DataConfig(), {}, 1)
        found = on_ranks(WORLD, measure, scratch, rounds, steps)
    title = f"{WORLD} ranks, turns of {steps} steps, {SAVES} checkpoints in each, {rounds} pairs"
    yield Table(title, COLUMNS, {f"steps on {work}": summary(found[work]) for work in WORKS})


if __name__ == "__main__":
    main()
