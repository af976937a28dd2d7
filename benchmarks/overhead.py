"""Overhead of the trainer's fault tolerance in runs without faults.

    python benchmarks/overhead.py [OPTIONS]

*With*: the guard's checks, the watcher for preemption notices, the goodput record, and a checkpoint every second or
two; the stall of a snapshot is counted separately. *Without*: the same ``TrainLoop`` on the same model and process
group with a guard and a goodput record that do nothing. Two ranks run both in turns of about 100 steps of 20 ms, in
alternating order; the figure is the median of the paired ratios with its distribution-free 95 % interval. Steps on *a
device* sleep, like a process that waits for a GPU; steps on *the host* compute on every core, so that concurrent writes
show most.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

from harness.command import benchmark
from harness.processes import on_ranks
from harness.steady import WORKS, WORLD, SteadyTrainer
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, interval_of_median, medians
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.train.fault_tolerance.consensus import CheckpointInterval
from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
from slipstream.pipeline.train.telemetry.step_times import StepTimes
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.ledger import STALL
from slipstream.shared.source.config import DataConfig

#: Saves per turn.
SAVES = 2


class NoGoodputRecorder(GoodputRecorder):
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

    def copy(self, complete: Callable[[], None]) -> None:
        complete()


class Bench(SteadyTrainer):
    def turn(self, guarded: bool, watcher: NoticeWatcher) -> tuple[float, float]:
        """Run one turn and return its seconds without stalls, and the seconds of the stalls."""
        if not guarded:
            return self.run(NoGuard()).wall, 0.0
        guard = Guard(self.checkpoints, CheckpointInterval(steps=self.steps // SAVES), watcher, self.recorder())
        guard.begin(self.state.progress.step)
        seconds = self.run(guard).wall
        stall = guard.recorder.record.seconds[STALL]
        self.checkpoints.finish()
        guard.close()
        return seconds - stall, stall


def measure(scratch: str, rounds: int, steps: int) -> dict[str, list[Figures]]:
    """Return the ratios of every pair of turns, with and without fault tolerance, by kind of work."""
    data = PreparedData.open(Path(scratch) / "prepared")
    found: dict[str, list[Figures]] = {}
    with NoticeWatcher([], grace_s=25) as watcher, redirect_stdout(io.StringIO()):
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
@click.option("--rounds", default=16, show_default=True, help="Pairs of turns for every kind of work.")
def main(quick: bool, rounds: int) -> Iterator[Table]:
    """Compare the step time with and without fault tolerance."""
    rounds, steps = (1, 4) if quick else (rounds, 100)
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch) / "prepared", "", "", DataConfig(), {}, 1)
        found = on_ranks(WORLD, measure, scratch, rounds, steps)
    title = f"{WORLD} ranks, turns of {steps} steps, {SAVES} checkpoints in each, {rounds} pairs"
    yield Table(title, COLUMNS, {f"steps on {work}": summary(found[work]) for work in WORKS})


if __name__ == "__main__":
    main()
