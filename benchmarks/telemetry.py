"""Telemetry's diagnosis compared with TraceML's, and the overhead of telemetry.

    python benchmarks/telemetry.py [OPTIONS]

*peer*: trainings of two processes on one table, each with one known fault. Ours is ``slipstream.pipeline.train.run``.
TraceML (the extra ``bench``) watches a plain DDP loop of the same model with the same fault, as its documentation
shows. The first diagnosis of each counts: for ours the largest cause above its threshold, or none. Ours is repeated, at
most twice, if other processes used more than 0.3 CPUs meanwhile. ``--quick`` skips TraceML.

*sampler*: CPU time and memory of the sampler process, which serves the totals of 8 ranks and is scraped every 5 s.

*upload*: CPU time of a pod's first rank for one upload (two per minute), which reads new samples and condenses all
samples, one hour after the start, with 8 devices.

*marks*: CPU time per step of the training thread for marks, the timestamps between a step's phases, and for adding up
their times. Steps with and without marks take turns. Steps follow each other at once, or after 20 ms, with cold caches.

*steps*: two ranks run turns with telemetry and without, in alternating order. Telemetry is the marks of every step, the
times in the consensus exchange, the totals that a thread writes every second, and a sampler process. *Without* is the
same loop with marks and times that do nothing. The ratio is between wall-clock times; CPU is the additional CPU time of
the training thread. Both are medians of the pairs with a distribution-free 95 % interval.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from harness.command import benchmark, part_option
from harness.links import NotAllowed
from harness.processes import on_ranks
from harness.provoked import HEALTHY, PROVOCATIONS, STEPS, WORLD, Outcome, free_port, quiet_run, run_with
from harness.steady import WORKS, Spent, SteadyTrainer
from harness.table import Column, Table
from harness.traceml_runs import Diagnosis, Failed, diagnosed, installed
from slipstream.operations.proofs.turns import Figures, interval_of_median
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.train.device_clock import DeviceClock
from slipstream.pipeline.train.fault_tolerance.consensus import CheckpointInterval
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
from slipstream.pipeline.train.telemetry.marks import ProcessorWait, StepMarks
from slipstream.pipeline.train.telemetry.pods import PERIOD_S
from slipstream.pipeline.train.telemetry.step_times import StepPhases, StepTimes
from slipstream.pipeline.train.telemetry.totals import written_totals
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.config import DataConfig
from slipstream.shared.telemetry import ring
from slipstream.shared.telemetry.metrics import MetricLabels
from slipstream.shared.telemetry.records import PHASES, STEP_BOUNDS, DeviceReading, HostReading, RankTotals, Sample
from slipstream.shared.telemetry.sampler.server import VARIABLE
from slipstream.shared.telemetry.series import condense_samples
from slipstream.shared.telemetry.totals import write_totals
from slipstream.shared.telemetry.watch import start_sampler, stop_sampler

FAULTS = ("slow loader on all", "slow link", "slow rank", "tiny batches")
LABELS = MetricLabels("benchmark", "train", 0, "here")
RANKS, DEVICES = 8, 8
SCRAPED_EVERY_S, SCRAPES = 5.0, 6
HOUR_S = 3600
UPLOADED_EVERY_S = round(PERIOD_S)


# Diagnoses


def row_of(ours: Outcome, theirs: Diagnosis | None) -> dict[str, float | str]:
    found = ours.bottleneck
    row: dict[str, float | str] = {
        "ours": found.verdict or "none",
        "share": found.shares.get(found.verdict, 0.0),
        "step": ours.step_s,
        "others": ours.others_cpus,
    }
    return row | ({"theirs": theirs.status, "their_step": theirs.step_s} if theirs else {})


def peer(quick: bool) -> Iterator[Table]:
    asked = installed() and not quick
    if not asked:
        why = "--quick does not run it" if quick else "it is not installed: pip install -e '.[bench]'"
        click.echo(f"\npeer: TraceML is skipped ({why})")
    every = [HEALTHY, *(each for each in PROVOCATIONS if each.name in FAULTS)]
    rows: dict[str, dict[str, float | str]] = {}
    words = []
    with tempfile.TemporaryDirectory() as scratch:
        tables, steps, run = (Path(scratch), 20, run_with) if quick else (Path(scratch), STEPS, quiet_run)
        for provocation in every[1:2] if quick else every:
            place = tables / provocation.name.replace(" ", "-")
            try:
                ours = run(provocation, tables, place / "ours", steps)
                theirs = diagnosed(provocation, tables, place / "traceml", steps) if asked else None
            except (NotAllowed, Failed) as reason:
                click.echo(f"\npeer: {provocation.name} is skipped ({reason})")
                continue
            rows[provocation.name] = row_of(ours, theirs)
            words += [f"{provocation.name}:", f"  ours: {ours.bottleneck.sentence}"]
            words += [f"  TraceML: {theirs.summary}"] if theirs else []
    if rows:
        yield Table(f"{WORLD} ranks, one known fault in each run", VERDICTS, rows, tuple(words))


VERDICTS = (
    Column("ours", "ours"),
    Column("its share", "share", "{:.0%}"),
    Column("step ms", "step", "{:.1f}", 1e-3),
    Column("CPUs of others", "others", "{:.1f}"),
    Column("TraceML", "theirs"),
    Column("step ms", "their_step", "{:.1f}", 1e-3),
)


# The sampler


def totals(rank: int) -> RankTotals:
    return RankTotals(rank, "", 20, 640, dict.fromkeys(PHASES, 0.6), [20] * len(STEP_BOUNDS), time.time(), 0.75, {})


def sampler_cost(scrapes: int, every_s: float) -> Figures:
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch, environment(VARIABLE, f"127.0.0.1:{port}"):
        place = Path(scratch)
        for rank in range(RANKS):
            write_totals(place, totals(rank))
        with sampled(place) as process:
            while not scrape(port):
                time.sleep(0.05)
            before, began = cpu_s(process), time.monotonic()
            lines = 0
            for _ in range(scrapes):
                time.sleep(every_s)
                lines = scrape(port)
            spent, seconds = cpu_s(process) - before, time.monotonic() - began
            peak = int(Path(f"/proc/{process}/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0])
    return {"cpu": spent / seconds, "memory": 1024 * peak, "lines": lines}


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def sampled(place: Path) -> Iterator[int]:
    """Run a sampler that writes to ``place`` in the block, and yield its process id after the first sample."""
    sampler = start_sampler(place, LABELS, {})
    assert sampler is not None
    try:
        while not ring.read_samples(place):
            time.sleep(0.05)
        yield sampler.pid
    finally:
        stop_sampler(sampler)


def scrape(port: int) -> int:
    """Return the number of lines of metrics; 0 if there is no server yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return len(answer.read().splitlines())
    except OSError:
        return 0


def cpu_s(process: int) -> float:
    """Return the CPU seconds of a process, ended threads included (Linux's clock of another process)."""
    return time.clock_gettime((~process << 3) | 2)


SAMPLER = (
    Column("CPU ms a second", "cpu", "{:.2f}", 1e-3),
    Column("memory, MB", "memory", "{:.1f}", 1e6),
    Column("lines served", "lines", "{:.0f}"),
)


# The upload


def upload_cost(seconds: int) -> Figures:
    with tempfile.TemporaryDirectory() as scratch:
        kept, samples = ring.SampleRing(Path(scratch)), ring.RingReader(Path(scratch))
        for second in range(seconds):
            host = HostReading(second / 2, 4, memory_used_bytes=1 << 30, memory_limit_bytes=1 << 32)
            gpus = (
                DeviceReading(f"GPU-{number}", number, "", busy=0.5, memory_used_bytes=1, memory_limit_bytes=2)
                for number in range(DEVICES)
            )
            if second == seconds - UPLOADED_EVERY_S:
                samples.read()
            kept.add(Sample(1.7e9 + second, host, tuple(gpus)))
        began = time.thread_time()
        condense_samples(samples.read(), 0, "here")
        return {"cpu": time.thread_time() - began}


UPLOAD = (Column("CPU ms each time", "cpu", "{:.0f}", 1e-3),)


# Marks


def marks_cost(steps: int, apart_s: float) -> Figures:
    """Measure the CPU seconds that marks cost a step of some tenths of a millisecond, with steps ``apart_s`` apart."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    rows, clock, wait, times = torch.randn(32, 64), DeviceClock(), ProcessorWait(), StepTimes(0, WORLD)

    def step(marked: bool) -> float:
        time.sleep(apart_s)
        began = time.thread_time()
        marks = StepMarks(clock, 0.0) if marked else None
        loss = model(rows).sum()
        if marks:
            marks.backward_of(loss)
        loss.backward()
        if marks:
            marks.has_exchanged()
            assert marks.gradient and marks.exchanged
            begin, gradient, exchanged = marks.begin.wait(), marks.gradient.wait(), marks.exchanged.wait()
            taken = StepPhases(0.0, gradient - begin, exchanged - gradient, 0.0, 0.0, wait.seconds(), marks.compute_cpu)
            times.add(taken)
        return time.thread_time() - began

    return more([step(True) - step(False) for _ in range(steps)])


def more(seconds: Sequence[float]) -> Figures:
    """Return the median of additional seconds and its 95 % interval; negative values are noise and become 0."""
    found = (max(0.0, each) for each in interval_of_median(seconds))
    return dict(zip(("marks", "marks_low", "marks_high"), found, strict=True))


MARKS = (
    Column("more CPU µs a step", "marks", "{:.0f}", 1e-6),
    Column("95 % from", "marks_low", "{:.0f}", 1e-6),
    Column("to", "marks_high", "{:.0f}", 1e-6),
)


# Steps


class NoMarks(StepMarks):
    def backward_of(self, loss: Tensor) -> None:
        pass

    def has_exchanged(self) -> None:
        pass


class NoProcessorWait(ProcessorWait):
    def seconds(self) -> float:
        return 0.0


class NoTimes(StepTimes):
    def add(self, time: StepPhases) -> None:
        pass

    def to_send(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def received(self, numbers: object) -> None:
        pass


class Unwatched(Guard):
    """Guard that marks no parts of a step and adds up no times."""

    def watch_nothing(self) -> None:
        self._processor_wait.close()
        self._processor_wait, self.times = NoProcessorWait(), NoTimes(self.times.rank, self.times.world)

    def before_step(self) -> StepMarks:
        return NoMarks(self._clock, 0.0)


class Trainer(SteadyTrainer):
    def turn(self, watched: bool, watcher: NoticeWatcher, place: Path) -> Spent:
        kind, recorder = Guard if watched else Unwatched, self.recorder()
        guard = kind(self.checkpoints, CheckpointInterval(steps=10**6), watcher, recorder)
        if isinstance(guard, Unwatched):
            guard.watch_nothing()
        guard.begin(self.state.progress.step)
        with (
            sampled(place) if watched and self.group.rank == 0 else nullcontext(),
            written_totals(place if watched else None, guard.times, recorder, self.group),
        ):
            spent = self.run(guard)
        guard.close()
        return spent


def step_costs(scratch: str, rounds: int, steps: int) -> dict[str, list[Figures]]:
    """Return the ratios of every pair of turns, with and without telemetry, by kind of work."""
    data = PreparedData.open(Path(scratch) / "prepared")
    found: dict[str, list[Figures]] = {}
    with NoticeWatcher([], grace_s=25) as watcher, redirect_stdout(io.StringIO()):
        for work in WORKS:
            trainer, found[work] = Trainer(data, work, f"{scratch}/{work}", steps), []
            place = Path(scratch) / f"samples-{work}"
            trainer.turn(True, watcher, place)  # unmeasured: the first pages of memory
            for round_ in range(rounds):
                taken = {}
                for watched in (True, False) if round_ % 2 else (False, True):
                    taken[watched] = trainer.turn(watched, watcher, place)
                on, off = taken[True], taken[False]
                each = {"ratio": on.wall / off.wall, "step": off.wall / steps, "more_cpu": (on.cpu - off.cpu) / steps}
                found[work].append(each)
    return found


def summary(rounds: list[Figures]) -> Figures:
    ratio, low, high = interval_of_median([each["ratio"] for each in rounds])
    step, *_ = interval_of_median([each["step"] for each in rounds])
    cpu = more([each["more_cpu"] for each in rounds])
    return {"step": step, "ratio": ratio, "ratio_low": low, "ratio_high": high, **cpu}


COSTS = (
    Column("step ms", "step", "{:.2f}", 1e-3),
    Column("with/without", "ratio", "{:.4f}"),
    Column("95 % from", "ratio_low", "{:.4f}"),
    Column("to", "ratio_high", "{:.4f}"),
    *MARKS,
)


def steps_table(quick: bool, rounds: int) -> Iterator[Table]:
    rounds, steps = (1, 4) if quick else (rounds, 100)
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch) / "prepared", "", "", DataConfig(), {}, 1)
        found = on_ranks(WORLD, step_costs, scratch, rounds, steps)
    rows = {f"steps on {work}": summary(found[work]) for work in WORKS}
    yield Table(f"{WORLD} ranks, turns of {steps} steps, {rounds} pairs", COSTS, rows)


@benchmark
@part_option(("peer", "sampler", "upload", "marks", "steps"))
@click.option("--rounds", default=16, show_default=True, help="Pairs of turns for every kind of work.")
def main(quick: bool, parts: tuple[str, ...], rounds: int) -> Iterator[Table]:
    """Compare telemetry's diagnosis with TraceML's, and measure the overhead of telemetry."""
    if "peer" in parts:
        yield from peer(quick)
    if "sampler" in parts:
        found = sampler_cost(*((1, 1.5) if quick else (SCRAPES, SCRAPED_EVERY_S)))
        yield Table("The sampler, on this machine's devices", SAMPLER, {"sampler": found})
    if "upload" in parts:
        seconds = 60 if quick else HOUR_S
        yield Table(f"Samples of {seconds} s, {DEVICES} devices", UPLOAD, {"upload": upload_cost(seconds)})
    if "marks" in parts:
        number = 10 if quick else 1000
        found_marks = {"one after the other": marks_cost(number, 0.0), "20 ms apart": marks_cost(number // 2, 0.02)}
        yield Table("Marks and times of a step", MARKS, found_marks)
    if "steps" in parts:
        yield from steps_table(quick, rounds)


if __name__ == "__main__":
    main()
