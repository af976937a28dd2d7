"""Training loader into the device's memory, compared with a usual DataLoader."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from slipstream.operations.proofs.gpu.check import CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.trainings import write_prepared
from slipstream.operations.proofs.turns import Figures, in_turns, settled
from slipstream.pipeline.train.data_loader import stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.distributed.process_group import RankContext

COLUMNS, BATCH, WORKERS = 200, 1024, 4
SIGNATURE = Signature((TensorSpec("numeric", "float32", (COLUMNS,)),), "classification", "y", ("a", "b"))
#: Inputs and targets on the device.
Pair = tuple[Tensor, Tensor]


def records(rows: int) -> np.ndarray:
    """Return records whose first column is the number of the row, from which the target follows."""
    draw, made = np.random.default_rng(0), np.zeros(rows, SIGNATURE.record)
    made["numeric"] = draw.normal(size=(rows, COLUMNS))
    made["numeric"][:, 0] = np.arange(rows)
    made[TARGET] = np.arange(rows) % 2
    return made


def ours(data: PreparedData, device: torch.device) -> Iterator[Pair]:
    order = GlobalOrder(stored_blocks(data, "train"), BATCH, seed=0)
    for batch in training_batches(data, order, RankContext(0, 1, device, "none")):
        yield batch.inputs[0], batch.target


def index_select(x: Tensor, y: Tensor, device: torch.device) -> Iterator[Pair]:
    """Yield batches from tensors in the host's memory, endlessly."""
    while True:
        for chosen in torch.randperm(len(x)).split(BATCH):
            yield x.index_select(0, chosen).to(device), y.index_select(0, chosen).to(device)


class WholeBatches(Dataset[Pair]):
    """Rows that are read a batch at a time, which is several times as fast as one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: list[int]) -> Pair:
        return self.x[rows], self.y[rows]


def data_loader(x: Tensor, y: Tensor, device: torch.device, workers: int) -> Iterator[Pair]:
    """Yield whole batches of a DataLoader with pinned memory, endlessly."""
    loader = DataLoader(
        WholeBatches(x, y),
        sampler=BatchSampler(RandomSampler(x), BATCH, drop_last=False),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
    )
    while True:
        for inputs, target in loader:
            yield inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)


def rate(batches: Iterator[Pair], most: int, device: torch.device) -> Figures:
    """Return the rows per second until the device has the last batch; it reads every batch once."""
    first, _ = next(batches)
    total = first.sum()
    started, count = time.perf_counter(), 0
    for inputs, _ in itertools.islice(batches, most):
        total += inputs.sum()
        count += len(inputs)
    total.item()
    return {"rows_per_s": count / (time.perf_counter() - started)}


def wrong_rows(batches: Iterator[Pair], rows: int) -> int:
    """Return the number of rows that an epoch does not have once; every row must have its target."""
    seen = torch.zeros(rows, dtype=torch.int64)
    while seen.sum() < rows:
        inputs, target = next(batches)
        number = inputs[:, 0].long().cpu()
        assert torch.equal(number % 2, target.long().cpu()), "a row has another row's target"
        seen.index_add_(0, number, torch.ones_like(number))
    return int((seen != 1).sum())


def loader(context: CheckContext) -> Iterator[CheckFigure]:
    rows, most = (8_192, 4) if context.small else (300_000, 280)
    made = records(rows)
    write_prepared(context.directory / "prepared", SIGNATURE, {"train": made, "validation": made[:8], "test": made[:8]})
    data = PreparedData.open(Path(context.directory / "prepared"))
    wrong = wrong_rows(ours(data, context.device), rows)
    yield CheckFigure("rows that came more or less than once", float(wrong))
    x, y = (torch.from_numpy(np.ascontiguousarray(made[name])) for name in ("numeric", TARGET))
    contenders: dict[str, Iterator[Pair]] = {"ours": ours(data, context.device)}
    contenders["index_select"] = index_select(x, y, context.device)
    # A test has threads: a worker that is forked from it may inherit a lock that a thread holds.
    for workers in (0,) if context.small else (0, WORKERS):
        contenders[f"DataLoader, {workers} workers"] = data_loader(x, y, context.device, workers)
    turns: dict[str, Callable[[], Figures]] = {
        name: partial(rate, batches, most, context.device) for name, batches in contenders.items()
    }
    found = {
        name: settled(figures)["rows_per_s"] for name, figures in in_turns(turns, 2 if context.small else 5).items()
    }
    for name, rows_per_s in found.items():
        yield CheckFigure(name, rows_per_s / 1e3, "krows/s")
    fastest = max(rows_per_s for name, rows_per_s in found.items() if name.startswith("DataLoader"))
    yield CheckFigure("over index_select", found["ours"] / found["index_select"], "x")
    yield CheckFigure("over DataLoader", found["ours"] / fastest, "x")
