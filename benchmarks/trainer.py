"""The trainer, compared with hand-written loops and libraries: same model, data, seed and optimiser, 2 processes.

    python benchmarks/trainer.py [OPTIONS]

Workloads: a table like the census (6 numbers, 8 categories, 22,784 rows, batches of 256) with the default MLP, and rows
of 64 tokens in batches of 16 with a transformer of 4 layers. The trainer and a rival take turns of whole epochs (2 s or
more) in alternating order, in several launches of their processes; in every other launch the rival is built first. A
loop's time differs by some percent between launches, so each launch gives one value: the median of its paired ratios of
wall and CPU time (of both processes). The figures are the medians of the launches, with their distribution-free 95 %
interval.

``same``: a loop over tensors in memory with all of the trainer's settings. The turns of a pair alternate epoch by
epoch, because the load of a shared machine changes within seconds; so every epoch includes one start and end of our
loop. The weights must be equal in the end, bit for bit. ``usual``: the common loop, with a DataLoader and AdamW with
its defaults. ``libraries``: Lightning Fabric, the Lightning Trainer and Accelerate with the same DataLoader and AdamW;
those that are not installed are skipped. ``processes``: the trainer in one process and in two, with models around the
limit below which a model trains in one process (:data:`slipstream.pipeline.train.checks.SMALL`).
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn

from harness.command import benchmark, part_option
from harness.loops import LENGTH, RIVALS, WORKLOADS, WORLD, Contender, Workload
from harness.processes import on_ranks
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, interval_of_median, medians
from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.checkpoint.state import AppState
from slipstream.pipeline.train.fault_tolerance.consensus import CheckpointInterval
from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
from slipstream.pipeline.train.loop.optimizer import make_optimizer
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights, kernels_configured
from slipstream.pipeline.train.loop.train_loop import TrainLoop
from slipstream.pipeline.train.parallel.replicas import replicate_model
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.config import ModelConfig


def shape_of_text(width: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }


#: Relative distance of weights that rounding explains: the trainer clips inside the fused optimiser.
ROUNDING = 1e-4
SAME, USUAL = "the same, by hand", "as people write it"
#: Names of libraries, and their packages.
LIBRARIES = {"Fabric": "lightning", "Lightning Trainer": "lightning", "Accelerate": "accelerate"}
PROCESSES = "processes"
PARTS = {"same": [SAME], "usual": [USUAL], "libraries": list(LIBRARIES), PROCESSES: []}
#: Models and batches around the limit: workload, arguments of the model, rows of a step.
AROUND_LIMIT: dict[str, tuple[str, dict[str, Any], int]] = {
    "table, 63 K weights, 64 rows": ("table", {}, 64),
    "table, 63 K weights, 256 rows": ("table", {}, 256),
    "table, 0.3 M weights, 256 rows": ("table", {"hidden": [512, 512]}, 256),
    "table, 1.2 M weights, 256 rows": ("table", {"hidden": [1024, 1024]}, 256),
    "text, 37 K weights, 16 x 64 tokens": ("transformer", shape_of_text(32, 2), 16),
    "text, 0.1 M weights, 16 x 64 tokens": ("transformer", shape_of_text(64, 2), 16),
}


class Ours(Contender):
    """The trainer with all of its fault tolerance; a turn ends before a checkpoint is due."""

    def __init__(self, data: PreparedData, workload: Workload, home: str) -> None:
        super().__init__(data, workload)
        world = dist.get_world_size()
        self.group = RankContext(self.rank, world, torch.device("cpu"), "gloo")
        traits = probe_model(self.model, self.group.device)
        self.state = TrainingState(
            replicate_model(self.model, traits, self.group),
            make_optimizer(self.model, self.config),
            LossScaler(self.group.device, enabled=False),
            copy_weights(self.model),
            Progress(),
            traits,
        )
        self.checkpoints = Checkpoints(home, AppState(self.model, self.state.optimizer), ResumePolicy({}))
        self.checkpoints.prepare(self.state.to_save())
        started = time.perf_counter()
        self.recorder = GoodputRecorder(self.checkpoints.home, 1, world, writes=self.rank == 0, started=started)
        watcher = NoticeWatcher([], grace_s=25).__enter__()
        self.guard = Guard(self.checkpoints, CheckpointInterval(steps=10**9), watcher, self.recorder)
        self.guard.begin(0)

    def prepare(self) -> None:
        # Every turn ends with one evaluation on a few rows; keep the history of the training short.
        self.state.progress.steps.clear()
        self.state.progress.evaluations.clear()

    def run(self) -> None:
        config = replace(self.config, epochs=self.done + self.epochs)
        with kernels_configured(config):
            loop = TrainLoop(self.state, self.data, config, self.group, "fp32", self.guard)
            loop.run(lambda *_: None)


def quick_form(workload: Workload) -> Workload:
    return replace(workload, steps=4, epochs=1)


def pair_of_turns(first: Contender, second: Contender, slices: int) -> dict[Contender, Figures]:
    """Run each ``slices`` times in the order first, second, second, first …, and return the sums of their figures."""
    taken: dict[Contender, list[Figures]] = {first: [], second: []}
    for number in range(slices):
        for contender in (second, first) if number % 2 else (first, second):
            taken[contender].append(contender.turn())
    return {contender: {key: sum(one[key] for one in had) for key in had[0]} for contender, had in taken.items()}


def measure(scratch: str, name: str, quick: bool, rivals: list[str], pairs: int, launch: int) -> dict[str, Any]:
    """Return the figures of every pair of turns by rival, and whether trainer and rival end with equal weights."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    # Lightning reads these as torchrun's.
    for variable, value in {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": WORLD}.items():
        os.environ[variable] = str(value)
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", LOCAL_WORLD_SIZE=str(WORLD), GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    workload = quick_form(WORKLOADS[name]) if quick else WORKLOADS[name]
    data = PreparedData.open(Path(scratch) / "prepared")
    found: dict[str, Any] = {}
    for rival_name in rivals:
        home, other = f"{scratch}/{launch}/{rival_name}", RIVALS[rival_name]
        slices = workload.epochs if rival_name == SAME else 1
        of_slice = replace(workload, epochs=workload.epochs // slices)
        if launch % 2:
            rival, ours = other(data, of_slice), Ours(data, of_slice, home)
        else:
            ours, rival = Ours(data, of_slice, home), other(data, of_slice)
        rounds: list[Figures] = []
        with redirect_stdout(io.StringIO()):
            ours.turn(), rival.turn()  # unmeasured: the first pages of memory
            for pair in range(pairs):
                first, second = (ours, rival) if pair % 2 else (rival, ours)
                taken = pair_of_turns(first, second, slices)
                rounds.append({f"ours_{key}": value for key, value in taken[ours].items()} | taken[rival])
        mine, other_weights = (nn.utils.parameters_to_vector(each.model.parameters()) for each in (ours, rival))
        distance = float((mine - other_weights).norm() / mine.norm())
        found[rival_name] = {"rounds": rounds, "equal": distance < ROUNDING}
    return found


def summary(launches: list[list[Figures]], steps: int) -> Figures:
    """Return our times over the rival's, as medians over the launches with 95 % intervals."""
    figures: Figures = {"step_ms": 1e3 * statistics.median(medians(rounds)["ours_wall"] for rounds in launches) / steps}
    for clock in ("wall", "cpu"):
        ratios = [statistics.median(turn[f"ours_{clock}"] / turn[clock] for turn in rounds) for rounds in launches]
        figures[clock], figures[f"{clock}_low"], figures[f"{clock}_high"] = interval_of_median(ratios)
    return figures


def workload_around(name: str, quick: bool) -> Workload:
    kind, arguments, batch = AROUND_LIMIT[name]
    model = ModelConfig(WORKLOADS[kind].model.name, arguments)
    return replace(WORKLOADS[kind], model=model, batch=batch, steps=4 if quick else 30, epochs=1)


def seconds_of_step(scratch: str, name: str, quick: bool, launch: str) -> list[float]:
    """Return the trainer's seconds of a step in this group, the median of three turns, and the number of weights."""
    logging.disable(logging.INFO)
    workload = workload_around(name, quick)
    with redirect_stdout(io.StringIO()):
        ours = Ours(PreparedData.open(Path(scratch) / "prepared"), workload, f"{scratch}/{launch}")
        ours.turn()
        seconds = statistics.median(ours.turn()["wall"] for _ in range(3)) / workload.steps
    return [seconds, sum(each.numel() for each in ours.model.parameters())]


def one_or_two_processes(quick: bool, launches: int) -> Table:
    """Compare the steps of one process with those of two, in alternating launches."""
    rows: dict[str, Figures] = {}
    for name, (kind, _, batch) in list(AROUND_LIMIT.items())[: 1 if quick else None]:
        workload = workload_around(name, quick)
        found: dict[int, list[float]] = {1: [], 2: []}
        weights = 0.0
        with tempfile.TemporaryDirectory() as scratch:
            workload.write(Path(scratch) / "prepared", batch * workload.steps)
            for launch in range(launches):
                for world in (1, 2) if launch % 2 else (2, 1):
                    took, weights = on_ranks(world, seconds_of_step, scratch, name, quick, f"{launch}-{world}")
                    found[world].append(took)
        ratio, low, high = interval_of_median([two / one for one, two in zip(found[1], found[2], strict=True)])
        work = weights * batch * (LENGTH if kind == "transformer" else 1)
        one = 1e3 * statistics.median(found[1])
        rows[name] = {"work": work, "one_ms": one, "two": ratio, "two_low": low, "two_high": high}
    columns = (
        Column("weights x rows, M", "work", "{:.1f}", 1e6),
        Column("one process, ms", "one_ms", "{:.2f}"),
        Column("two/one", "two", "{:.2f}"),
        Column("95 % from", "two_low", "{:.2f}"),
        Column("to", "two_high", "{:.2f}"),
    )
    return Table(f"steps of one process and of two, one thread each, {launches} launches", columns, rows)


COLUMNS = (
    Column("our step ms", "step_ms", "{:.2f}"),
    Column("wall, ours/its", "wall", "{:.3f}"),
    Column("95 % from", "wall_low", "{:.3f}"),
    Column("to", "wall_high", "{:.3f}"),
    Column("CPU", "cpu", "{:.3f}"),
    Column("95 % from", "cpu_low", "{:.3f}"),
    Column("to", "cpu_high", "{:.3f}"),
)


@benchmark
@part_option(PARTS)
@click.option("--model", "models", type=click.Choice(list(WORKLOADS)), multiple=True, default=list(WORKLOADS))
@click.option("--launches", default=12, show_default=True, help="Launches of the processes.")
@click.option("--pairs", default=3, show_default=True, help="Pairs of turns with every peer in a launch.")
def main(quick: bool, parts: tuple[str, ...], models: tuple[str, ...], launches: int, pairs: int) -> Iterator[Table]:
    """Compare our step time with those of hand-written loops and of libraries."""
    absent = {name for name, module in LIBRARIES.items() if not importlib.util.find_spec(module)}
    rivals = [name for part, names in PARTS.items() if part in parts for name in names if name not in absent]
    launches, pairs = (1, 1) if quick else (launches, pairs)
    if PROCESSES in parts:
        yield one_or_two_processes(quick, launches)
    for name in models if rivals else ():
        if quick and name != models[0]:  # run libraries with the first model only
            rivals = [rival for rival in rivals if rival not in LIBRARIES] or rivals
        workload = quick_form(WORKLOADS[name]) if quick else WORKLOADS[name]
        with tempfile.TemporaryDirectory() as scratch:
            workload.write(Path(scratch) / "prepared", workload.batch * workload.steps)
            found = [
                on_ranks(WORLD, measure, scratch, name, quick, rivals, pairs, launch) for launch in range(launches)
            ]
        steps = workload.epochs * workload.steps
        if SAME in rivals and not all(launch[SAME]["equal"] for launch in found):
            raise click.ClickException("the trainer's weights differ from those of the loop with the same settings")
        yield Table(
            f"{name}: {WORLD} processes, turns of {steps} steps of {workload.batch} rows, {launches} launches, in each "
            f"{pairs} pairs",
            COLUMNS,
            {rival: summary([launch[rival]["rounds"] for launch in found], steps) for rival in rivals},
            (f"weights equal bit for bit: {SAME}",) if SAME in rivals else (),
        )


if __name__ == "__main__":
    main()
