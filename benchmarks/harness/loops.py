"""Training loops that the trainer is compared with: hand-written loops and libraries."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from slipstream.operations.proofs.turns import Figures
from slipstream.pipeline.prepare.shuffle import block_rows
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import stored_blocks
from slipstream.pipeline.train.data_order import GlobalOrder, rank_slice
from slipstream.pipeline.train.loop.objective import token_losses
from slipstream.pipeline.train.loop.optimizer import learning_rate, make_optimizer
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import KIND, TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.machine.torch_versions import wrap_in_ddp
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model

WORLD = 2
CARDINALITIES = (9, 16, 7, 15, 6, 5, 2, 42)
TOKENS, LENGTH = 256, 64


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    ``write(directory, rows)`` prepares the data; a turn is ``epochs`` epochs of ``steps`` batches.
    """

    model: ModelConfig
    batch: int
    steps: int
    epochs: int
    write: Callable[[Path, int], object]
    #: Sum of the rows' losses from outputs and targets, computed as in the trainer; ``loss_mean`` is their mean.
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    loss_mean: Callable[[Tensor, Tensor], Tensor]


def write_table(directory: Path, rows: int) -> None:
    """Write prepared data like the census table: 6 numeric and 8 categorical columns."""
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
    write_record(writer, "signature.json", signature)
    writer.finish(KIND, {})


def write_tokens(directory: Path, rows: int) -> None:
    """Write rows of random tokens.

    Each rank gets a row of validation, because the trainer's turn ends with an evaluation.
    """
    draw = np.random.default_rng(0)
    splits = {"train": rows, "validation": WORLD, "test": WORLD}
    write_token_rows(directory, {name: draw.integers(0, TOKENS, (n, LENGTH + 1)) for name, n in splits.items()}, TOKENS)


WORKLOADS = {
    "table": Workload(
        *(ModelConfig("mlp"), 256, 89, 10, write_table),
        loss_sum=lambda outputs, target: cross_entropy(outputs, target, reduction="sum"),
        loss_mean=cross_entropy,
    ),
    "transformer": Workload(
        ModelConfig(
            "transformer",
            {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
        ),
        *(16, 32, 2, write_tokens),
        # The trainer's own function: torch's gradient differs in the last digit.
        loss_sum=lambda outputs, target: (
            token_losses(outputs.flatten(0, 1), target.flatten()).view(target.shape).mean(dim=1).sum()
        ),
        loss_mean=lambda outputs, target: cross_entropy(outputs.transpose(1, 2), target),
    ),
}


class Contender(ABC):
    """Training loop that trains its model for ``epochs`` more epochs in every turn."""

    def __init__(self, data: PreparedData, workload: Workload) -> None:
        self.data, self.workload, self.epochs, self.done = data, workload, workload.epochs, 0
        self.config = TrainingConfig(batch_size=workload.batch, evaluate_every=10**6, patience=0)
        self.model = build_model(workload.model, data.signature, seed=0)
        self.order = GlobalOrder(stored_blocks(data, "train"), workload.batch, seed=0)
        self.rank = dist.get_rank()

    @property
    def total(self) -> int:
        """Number of the next turn's last step, for the learning rate schedule."""
        return (self.done + self.epochs) * self.order.steps_per_epoch

    @abstractmethod
    def prepare(self) -> None:
        """Do the untimed work before a turn."""

    @abstractmethod
    def run(self) -> None:
        """Train ``epochs`` epochs; only this method is timed."""

    def turn(self) -> Figures:
        """Run a turn and return its wall seconds, and CPU seconds of all ranks."""
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


class HandWritten(Contender):
    """Hand-written loop over tensors in memory, with the trainer's settings."""

    def __init__(self, data: PreparedData, workload: Workload) -> None:
        super().__init__(data, workload)
        self.inputs, self.target = tensors_of(data)
        self.optimizer = make_optimizer(self.model, self.config)
        self.ddp = wrap_in_ddp(self.model)
        self.rows: list[Tensor] = []

    def prepare(self) -> None:
        first = self.done * self.order.steps_per_epoch
        mine = rank_slice(self.rank, WORLD, self.workload.batch)
        self.rows = [torch.from_numpy(self.order.batch(step)[mine]) for step in range(first, self.total)]

    def run(self) -> None:
        first = self.done * self.order.steps_per_epoch
        losses = torch.zeros((), dtype=torch.float64)
        for step, rows in enumerate(self.rows, start=first):
            rate = learning_rate(step, self.total, self.config.learning_rate, self.config.warmup)
            for settings in self.optimizer.param_groups:
                settings["lr"] = rate
            outputs = self.ddp(*(x[rows] for x in self.inputs))
            loss = self.workload.loss_sum(outputs, self.target[rows])
            (loss * (WORLD / self.workload.batch)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses += loss.detach()
        dist.all_reduce(losses)


class Usual(Contender):
    """Loop as commonly written, with a DataLoader and AdamW."""

    def __init__(self, data: PreparedData, workload: Workload) -> None:
        super().__init__(data, workload)
        inputs, target = tensors_of(data)
        dataset = TensorDataset(*inputs, target)
        self.sampler: Any = DistributedSampler(dataset, num_replicas=WORLD, rank=self.rank, shuffle=True)
        self.loader: Any = DataLoader(dataset, batch_size=workload.batch // WORLD, sampler=self.sampler)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.wrapped: Any = self.wrap()

    def wrap(self) -> nn.Module:
        return DistributedDataParallel(self.model)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.wrapped.parameters(), 1.0)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def prepare(self) -> None:
        """Do nothing: in the common loop all work is timed."""

    def run(self) -> None:
        for epoch in range(self.done, self.done + self.epochs):
            self.sampler.set_epoch(epoch)
            losses = 0.0
            for *inputs, target in self.loader:
                self.optimizer.zero_grad()
                loss = self.workload.loss_mean(self.wrapped(*inputs), target)
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
        # Accelerate divides the batches of a plain loader among the processes.
        self.loader = DataLoader(self.loader.dataset, batch_size=self.workload.batch // WORLD, shuffle=True)
        wrapped, self.optimizer, self.loader = self.accelerator.prepare(self.model, self.optimizer, self.loader)
        return wrapped

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self) -> None:
        self.accelerator.clip_grad_norm_(self.wrapped.parameters(), 1.0)


class LightningTrainer(Usual):
    """Lightning Trainer, timed from the start of its first epoch to the end of the last, without set-up."""

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
                return owner.workload.loss_mean(self.network(*inputs), target)

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
    records = data.split("train")
    inputs = [torch.from_numpy(np.array(records[spec.name])) for spec in data.signature.inputs]
    return inputs, torch.from_numpy(np.array(records[TARGET])).long()


RIVALS: dict[str, Callable[[PreparedData, Workload], Contender]] = {
    "the same, by hand": HandWritten,
    "as people write it": Usual,
    "Fabric": Fabric,
    "Lightning Trainer": LightningTrainer,
    "Accelerate": Accelerate,
}
