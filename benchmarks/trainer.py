"""The trainer beside hand-written loops and libraries: same model, data, seed and optimiser, 2 processes.

    python benchmarks/trainer.py [--quick] [--json FILE] [--part same|usual|libraries] [--pairs N]

A table like the census (6 numbers, 8 categories, 22,784 rows, batches of 256) and the default MLP. The trainer and a
rival take turns of five epochs (2 s or more) in alternating order; the figures are medians of the paired ratios of wall
and CPU time (of both processes), with their distribution-free 95 % interval. ``same``: a loop over tensors in memory
with every setting as the trainer has it; the weights have to be equal, bit for bit, in the end. ``usual``: the loop as
people write it, with a DataLoader and AdamW as it comes. ``libraries``: Lightning Fabric, the Lightning Trainer and
Accelerate with that DataLoader and that AdamW; those that are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness.command import benchmark, part_option
from harness.processes import on_ranks
from harness.table import Column, Table
from harness.turns import Figures, interval_of_median, medians
from tasks.artifacts.format import ArtifactWriter
from tasks.artifacts.prepared import KIND, TARGET, PreparedData, Signature, TensorSpec
from tasks.distributed.process_group import Group
from tasks.models.config import ModelConfig
from tasks.models.factory import build
from tasks.preprocess.shuffle.sorted_runs import block_rows
from tasks.train.checkpoint import Checkpoints
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import layout
from tasks.train.data.order import GlobalOrder, share
from tasks.train.loop.precision import LossScaler, kernels
from tasks.train.loop.probe import probe
from tasks.train.loop.schedule import learning_rate
from tasks.train.loop.state import Progress, TrainingState, weights_of
from tasks.train.loop.step import make_optimizer
from tasks.train.loop.train_loop import TrainLoop
from tasks.train.parallel.replicas import replicate
from tasks.train.survival.checkpoint_interval import Interval
from tasks.train.survival.goodput import GoodputRecorder
from tasks.train.survival.guard import Guard
from tasks.train.survival.notices import Watcher

WORLD, BATCH, STEPS_PER_EPOCH, EPOCHS = 2, 256, 89, 5
CARDINALITIES = (9, 16, 7, 15, 6, 5, 2, 42)
#: Published names and what has to be installed.
LIBRARIES = {"Fabric": "lightning", "Lightning Trainer": "lightning", "Accelerate": "accelerate"}
PARTS = ("same", "usual", "libraries")


def make(directory: Path, rows: int) -> None:
    """Prepared data."""
    inputs = (TensorSpec("numeric", "float32", (6,)), TensorSpec("categorical", "int32", (len(CARDINALITIES),)))
    signature = Signature(inputs, "classification", "income", ("below", "above"), CARDINALITIES)
    draw, record = np.random.default_rng(0), signature.record
    writer = ArtifactWriter(directory)
    for split, count in {"train": rows, "validation": 64}.items():
        records = np.zeros(count, record)
        records["numeric"] = draw.normal(size=(count, 6))
        records["categorical"] = draw.integers(0, CARDINALITIES, size=(count, len(CARDINALITIES)))
        records[TARGET] = records["numeric"][:, 0] + draw.normal(size=count) > 0
        with writer.create(f"{split}-00000.rows", block_rows(record.itemsize) * record.itemsize) as file:
            file.write(records.tobytes())
    writer.write_json("signature.json", signature.to_json())
    writer.finish(KIND, {})


class Contender(ABC):
    """Trains a model of its own from turn to turn; a turn is ``epochs`` epochs more."""

    def __init__(self, data: PreparedData, epochs: int) -> None:
        self.data, self.epochs, self.done = data, epochs, 0
        self.config = TrainingConfig(batch_size=BATCH, evaluate_every=10**6, patience=0)
        self.model = build(ModelConfig("mlp"), data.signature, seed=0)
        self.order = GlobalOrder(layout(data, "train"), BATCH, seed=0)
        self.rank = dist.get_rank()

    @property
    def total(self) -> int:
        """Steps until the end of the next turn, by which the learning rate goes."""
        return (self.done + self.epochs) * self.order.steps_per_epoch

    @abstractmethod
    def prepare(self) -> None:
        """What is not timed, before a turn."""

    @abstractmethod
    def run(self) -> None:
        """What is timed: ``epochs`` epochs."""

    def turn(self) -> Figures:
        """Wall seconds of a turn, and CPU seconds of all processes."""
        self.prepare()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        dist.barrier()
        spent = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
        wall = time.perf_counter() - wall
        dist.all_reduce(spent)
        self.done += self.epochs
        return {"wall": wall, "cpu": spent.item()}


class Ours(Contender):
    """The trainer with everything on that survival needs; a turn ends before a checkpoint is due."""

    def __init__(self, data: PreparedData, epochs: int, home: str) -> None:
        super().__init__(data, epochs)
        self.group = Group(self.rank, WORLD, torch.device("cpu"), "gloo")
        traits = probe(self.model, self.group.device)
        self.state = TrainingState(
            replicate(self.model, traits, self.group),
            make_optimizer(self.model, self.config),
            LossScaler(self.group.device, enabled=False),
            weights_of(self.model),
            Progress(),
            traits,
        )
        self.checkpoints = Checkpoints(home, model=self.model, optimizer=self.state.optimizer, identity={})
        self.checkpoints.prepare(self.state.to_save())
        store, started = self.checkpoints.home, time.perf_counter()
        self.recorder = GoodputRecorder(store, 1, WORLD, writes=self.rank == 0, started=started)
        watcher = Watcher([], grace_s=25).__enter__()
        self.guard = Guard(self.checkpoints, Interval(steps=10**9), watcher, self.recorder)
        self.guard.begin(0)

    def prepare(self) -> None:
        # One evaluation, on a few rows, is the end of every turn; the course of training is to stay short.
        self.state.progress.steps.clear()
        self.state.progress.evaluations.clear()

    def run(self) -> None:
        config = replace(self.config, epochs=self.done + self.epochs)
        with kernels(config):
            loop = TrainLoop(self.state, self.data, config, self.group, "fp32", self.guard, self.recorder)
            loop.run(lambda *_: None)


class HandWritten(Contender):
    """A loop over tensors in memory, with the trainer's settings."""

    def __init__(self, data: PreparedData, epochs: int) -> None:
        super().__init__(data, epochs)
        self.inputs, self.target = tensors_of(data)
        self.optimizer = make_optimizer(self.model, self.config)
        self.ddp = DistributedDataParallel(self.model, forward_sync_buffers=False)
        self.rows: list[Tensor] = []

    def prepare(self) -> None:
        first = self.done * self.order.steps_per_epoch
        mine = share(self.rank, WORLD, BATCH)
        self.rows = [torch.from_numpy(self.order.batch(step)[mine]) for step in range(first, self.total)]

    def run(self) -> None:
        first = self.done * self.order.steps_per_epoch
        losses = torch.zeros((), dtype=torch.float64)
        for step, rows in enumerate(self.rows, start=first):
            rate = learning_rate(step, self.total, self.config.learning_rate, self.config.warmup)
            for settings in self.optimizer.param_groups:
                settings["lr"] = rate
            outputs = self.ddp(*(x[rows] for x in self.inputs))
            loss = cross_entropy(outputs, self.target[rows], reduction="sum")
            (loss * (WORLD / BATCH)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses += loss.detach()
        dist.all_reduce(losses)


class Usual(Contender):
    """The loop as people write it."""

    def __init__(self, data: PreparedData, epochs: int) -> None:
        super().__init__(data, epochs)
        inputs, target = tensors_of(data)
        dataset = TensorDataset(*inputs, target)
        self.sampler: Any = DistributedSampler(dataset, num_replicas=WORLD, rank=self.rank, shuffle=True)
        self.loader: Any = DataLoader(dataset, batch_size=BATCH // WORLD, sampler=self.sampler)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.wrapped: Any = self.wrap()

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.wrapped.parameters(), 1.0)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def prepare(self) -> None:
        """As people write it, all of it is part of the loop."""

    def run(self) -> None:
        for epoch in range(self.done, self.done + self.epochs):
            self.sampler.set_epoch(epoch)
            losses = 0.0
            for *inputs, target in self.loader:
                self.optimizer.zero_grad()
                loss = cross_entropy(self.wrapped(*inputs), target)
                self.backward(loss)
                self.clip()
                self.optimizer.step()
                losses += loss.item()


class Fabric(Usual):
    def wrap(self) -> nn.Module:
        from lightning.fabric import Fabric as Library

        self.fabric = Library(accelerator="cpu", devices=WORLD, strategy="ddp")
        self.fabric.launch()
        wrapped, self.optimizer = self.fabric.setup(self.model, self.optimizer)
        self.loader = self.fabric.setup_dataloaders(self.loader, use_distributed_sampler=False)
        return wrapped

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self) -> None:
        self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=1.0)


class Accelerate(Usual):
    def wrap(self) -> nn.Module:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        # It gives each process its share of the batches of a plain loader.
        self.loader = DataLoader(self.loader.dataset, batch_size=BATCH // WORLD, shuffle=True)
        wrapped, self.optimizer, self.loader = self.accelerator.prepare(self.model, self.optimizer, self.loader)
        return wrapped

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self) -> None:
        self.accelerator.clip_grad_norm_(self.wrapped.parameters(), 1.0)


class LightningTrainer(Usual):
    """Timed from the start of its first epoch to the end of the last, without its set-up."""

    def turn(self) -> Figures:
        from lightning.pytorch import Callback, LightningModule, Trainer

        owner, network = self, self.model
        taken: Figures = {}

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def training_step(self, batch: Any, _: int) -> Tensor:
                *inputs, target = batch
                return cross_entropy(self.network(*inputs), target)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return owner.optimizer

        class Timed(Callback):
            def on_train_start(self, *_: Any) -> None:
                dist.barrier()
                self.wall, self.cpu = time.perf_counter(), time.process_time()

            def on_train_end(self, *_: Any) -> None:
                dist.barrier()
                taken.update(wall=time.perf_counter() - self.wall, cpu=time.process_time() - self.cpu)

        trainer = Trainer(
            accelerator="cpu",
            devices=WORLD,
            strategy="ddp",
            max_epochs=self.epochs,
            gradient_clip_val=1.0,
            callbacks=[Timed()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(Module(), self.loader)
        spent = torch.tensor([taken["cpu"]], dtype=torch.float64)
        dist.all_reduce(spent)
        return {"wall": taken["wall"], "cpu": spent.item()}

    def wrap(self) -> nn.Module:
        return self.model


def tensors_of(data: PreparedData) -> tuple[list[Tensor], Tensor]:
    """Inputs and targets of the training split, in memory."""
    records = data.split("train")
    inputs = [torch.from_numpy(np.array(records[spec.name])) for spec in data.signature.inputs]
    return inputs, torch.from_numpy(np.array(records[TARGET])).long()


RIVALS: dict[str, Callable[[PreparedData, int], Contender]] = {
    "the same, by hand": HandWritten,
    "as people write it": Usual,
    "Fabric": Fabric,
    "Lightning Trainer": LightningTrainer,
    "Accelerate": Accelerate,
}


def measure(scratch: str, rivals: list[str], pairs: int, epochs: int) -> dict[str, Any]:
    """The pairs of turns with each rival, and whether the weights are equal in the end."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    # Lightning takes them for torchrun's.
    for name, value in {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": WORLD}.items():
        os.environ[name] = str(value)
    os.environ.update(TORCHELASTIC_RUN_ID="benchmark", LOCAL_WORLD_SIZE=str(WORLD), GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    data = PreparedData.open(Path(scratch) / "prepared")
    found: dict[str, Any] = {}
    for number, name in enumerate(rivals):
        ours, rival = Ours(data, epochs, f"{scratch}/{number}"), RIVALS[name](data, epochs)
        rounds: list[Figures] = []
        with redirect_stdout(io.StringIO()):
            ours.turn(), rival.turn()  # unmeasured: the first pages of memory
            for pair in range(pairs):
                first, second = (ours, rival) if pair % 2 else (rival, ours)
                taken = {first: first.turn(), second: second.turn()}
                rounds.append({f"ours_{key}": value for key, value in taken[ours].items()} | taken[rival])
        weights = zip(ours.model.parameters(), rival.model.parameters(), strict=True)
        found[name] = {"rounds": rounds, "equal": all(torch.equal(a, b) for a, b in weights)}
    return found


def summary(rounds: list[Figures], steps: int) -> Figures:
    """Medians of our times over the rival's, each with an interval that holds it in 95 of 100 cases."""
    figures: Figures = {"step_ms": 1e3 * medians(rounds)["ours_wall"] / steps}
    for clock in ("wall", "cpu"):
        ratios = [round_[f"ours_{clock}"] / round_[clock] for round_ in rounds]
        figures[clock], figures[f"{clock}_low"], figures[f"{clock}_high"] = interval_of_median(ratios)
    return figures


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
@click.option("--pairs", default=30, show_default=True, help="Pairs of turns with each rival.")
def main(quick: bool, parts: tuple[str, ...], pairs: int) -> Iterator[Table]:
    """Our time for a step over that of hand-written loops and of libraries."""
    pairs, steps_per_epoch, epochs = (1, 4, 1) if quick else (pairs, STEPS_PER_EPOCH, EPOCHS)
    installed = [name for name, module in LIBRARIES.items() if importlib.util.find_spec(module)]
    chosen = {"same": ["the same, by hand"], "usual": ["as people write it"], "libraries": installed}
    rivals = [name for part in PARTS if part in parts for name in chosen[part]]
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch) / "prepared", BATCH * steps_per_epoch)
        found = on_ranks(WORLD, measure, scratch, rivals, pairs, epochs)
    rows = {name: summary(one["rounds"], epochs * steps_per_epoch) for name, one in found.items()}
    remarks = ["weights equal bit for bit: " + ", ".join(name for name, one in found.items() if one["equal"])]
    if "same" in parts and not found["the same, by hand"]["equal"]:
        raise click.ClickException("the weights of the trainer are not those of the loop with the same settings")
    yield Table(
        f"{WORLD} processes, turns of {epochs * steps_per_epoch} steps of {BATCH} rows, {pairs} pairs",
        COLUMNS,
        rows,
        tuple(remarks if "same" in parts else ()),
    )


if __name__ == "__main__":
    main()
