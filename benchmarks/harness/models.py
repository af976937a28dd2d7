"""Model, table and training function that several benchmarks share."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from harness.processes import alone
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.trained import TrainedModel

#: ``model.name`` of :func:`plain_mlp`.
PLAIN_MLP = "harness.models:plain_mlp"


class PlainMLP(nn.Module):
    """MLP of linear layers and ReLU only, which profits most from integer arithmetic."""

    def __init__(self, features: int, outputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [features, *hidden]
        steps = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]
        self.layers = nn.Sequential(*chain.from_iterable(steps), nn.Linear(widths[-1], outputs))

    def forward(self, numeric: Tensor) -> Tensor:
        return self.layers(numeric)


def plain_mlp(signature: Signature, hidden: Sequence[int] = (512, 256, 64)) -> nn.Module:
    return PlainMLP(signature.inputs[0].shape[0], signature.outputs, hidden)


def write_table(path: Path, rows: int, features: int) -> None:
    """Write a table whose label is a noisy function of products and thresholds of its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    hidden = np.maximum(x @ rng.normal(size=(features, 32)) / np.sqrt(features), 0)
    score = hidden @ rng.normal(size=32) + 0.5 * rng.normal(size=rows)
    columns = {f"x{number:03d}": x[:, number] for number in range(features)}
    label = np.where(score > np.median(score), "yes", "no")
    pq.write_table(pa.table({**columns, "label": label}), path)


def train(prepared: Path, directory: Path, model: ModelConfig, training: TrainingConfig, **more: Any) -> TrainedModel:
    """Train on one rank in a fresh process; ``more`` are further arguments of ``TrainingRequest``."""
    alone(train_here, prepared, directory, model, training, more)
    return TrainedModel.open(directory, model.factory)


def train_here(
    prepared: Path, directory: Path, model: ModelConfig, training: TrainingConfig, more: dict[str, Any]
) -> None:
    from slipstream.pipeline.train.request import TrainingRequest
    from slipstream.pipeline.train.run import run_attempt

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["SLIPSTREAM_LOG"] = "warning"
    group = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in group.items()})
    made_by = {"command": "benchmarks"}
    with redirect_stdout(io.StringIO()):  # its progress
        run_attempt(TrainingRequest(prepared, model, training, directory, f"{directory}.checkpoints", made_by, **more))
