"""Small prepared data and small models, made in memory, for tests of evaluation and export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from slipstream.operations.proofs.gpu.trainings import TABLE_ROWS, write_prepared
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.trained import Architecture, write_trained


@dataclass
class ToyTrained:
    """Stands for a trained model: what the engines read of one."""

    signature: Signature
    model: nn.Module
    history: dict[str, Any] = field(default_factory=dict)
    config: ModelConfig = field(default_factory=ModelConfig)
    artifact: Artifact = Artifact(Path(), "train", {}, {}, "")
    inherited: dict[str, dict[str, Any]] = field(default_factory=dict)
    threshold: float | None = None

    def load(self) -> nn.Module:
        return self.model.eval()


class TableModel(nn.Module):
    """An MLP over numeric columns and embedded categories."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in signature.cardinalities)
        width = signature.inputs[0].shape[0] + 4 * len(signature.cardinalities)
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, signature.outputs)

    def forward(self, numeric: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
        embedded = [embed(categorical[:, i]) for i, embed in enumerate(self.embeddings)]
        return self.head(self.layers(torch.cat([numeric, *embedded], dim=1)))


class ImageModel(nn.Module):
    """A small convolutional network with GroupNorm over uint8 images."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.block = nn.Sequential(
            nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, outputs)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        x = self.stem((inputs[0].float() - 8) / 6)
        return self.head((x + self.block(x)).mean((2, 3)))


def images(directory: Path) -> PreparedData:
    """Three classes: a bright left, middle or right third in a noisy 9 x 9 image."""
    rng = np.random.default_rng(0)
    spec = TensorSpec("image", "uint8", (1, 9, 9))
    signature = Signature(
        (spec,), "classification", "third", ("left", "middle", "right"), image_mean=(8.0,), image_std=(6.0,)
    )
    splits = {}
    for split, rows in TABLE_ROWS.items():
        records = np.zeros(rows, signature.record)
        labels = rng.integers(0, 3, rows)
        pixels = rng.integers(0, 8, (rows, 1, 9, 9))
        for row, label in enumerate(labels):
            pixels[row, 0, :, 3 * label : 3 * label + 3] += 6
        records["image"], records[TARGET] = pixels, labels
        splits[split] = records
    return write_prepared(directory, signature, splits)


class InTargetUnits(nn.Module):
    """A regressor whose outputs are scaled back to the units of the target."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model = model
        # In the targets' precision: exporters round Python's numbers to float32.
        dtype = getattr(torch, signature.target_dtype)
        self.std, self.mean = (torch.tensor(x, dtype=dtype) for x in (signature.target_std, signature.target_mean))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs).to(self.std.dtype) * self.std + self.mean


def untrained(directory: Path, data: PreparedData) -> Artifact:
    """The artifact of a small MLP as it was initialised."""
    config = ModelConfig(arguments={"hidden": [8]})
    return as_artifact(directory, config, data, build_model(config, data.signature, seed=0).state_dict())


def as_artifact(
    directory: Path, config: ModelConfig, data: PreparedData, weights: Mapping[str, torch.Tensor]
) -> Artifact:
    """The artifact of a model with these weights that says nothing of its training."""
    return write_trained(directory, Architecture(config, data.signature), weights, weights, {})


def trained_on(data: PreparedData, steps: int = 150) -> ToyTrained:
    """A model of the data's kind, trained for a moment on its training split."""
    signature = data.signature
    torch.manual_seed(0)
    table_like = signature.inputs[0].name == "numeric"
    model: nn.Module = TableModel(signature) if table_like else ImageModel(signature.outputs)
    if signature.task == "regression":
        model = InTargetUnits(model, signature)
    train = data.split("train")
    tensors = [torch.from_numpy(np.array(train[spec.name])) for spec in signature.inputs]
    target = torch.from_numpy(np.array(train[TARGET]))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        outputs = model(*tensors)
        if signature.task == "classification":
            loss = nn.functional.cross_entropy(outputs, target.long())
        else:
            loss = nn.functional.mse_loss(outputs[:, 0] / signature.target_std, target / signature.target_std)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return ToyTrained(signature, model)
