"""A common training loop, traced as TraceML's documentation shows.

    traceml run traced_loop.py --args SETTINGS.json

Model, table and fault are the same as in :mod:`harness.provoked`, which writes the settings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import traceml_ai as traceml
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from harness.loops import tensors_of
from harness.provoked import BATCH, EPOCH, WORLD, products
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model


class Rows(Dataset[Any]):
    """Dataset in memory; gathering a batch takes ``gathering_s`` seconds longer, as from a slow disk."""

    def __init__(self, inputs: Tensor, target: Tensor, gathering_s: float) -> None:
        self.inputs, self.target, self.gathering_s = inputs, target, gathering_s

    def __len__(self) -> int:
        return len(self.target)

    def __getitems__(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        if self.gathering_s:
            time.sleep(self.gathering_s * len(rows) / (BATCH // WORLD))
        return self.inputs[rows], self.target[rows]


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    traceml.init(mode="auto")
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    data = PreparedData.open(Path(settings["prepared"]))
    (inputs,), target = tensors_of(data)
    rows = Rows(inputs, target, settings["gathering_s"] if rank in settings["slow_ranks"] else 0.0)
    sampler: Any = DistributedSampler(rows)
    batch = settings["batch_size"] // WORLD
    # A batch is gathered as a whole: row by row the loader would slow the healthy run, too.
    loader: Any = DataLoader(rows, batch_size=batch, sampler=sampler, collate_fn=lambda batch: batch)
    model = DistributedDataParallel(
        build_model(ModelConfig("mlp", {"hidden": settings["layers"]}), data.signature, seed=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    busy = products(settings["backward_s"]) if rank == 1 and settings["backward_s"] else None
    for epoch in range(-(-settings["steps"] // EPOCH)):
        sampler.set_epoch(epoch)
        for numbers, classes in loader:
            with traceml.trace_step(model):
                optimizer.zero_grad(set_to_none=True)
                loss = nn.functional.cross_entropy(model(numbers), classes)
                if busy:
                    loss.register_hook(busy)
                loss.backward()
                optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
