"""Networks as users write them, for ``model.name``."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.artifacts.prepared.data import Signature


def numbers(signature: Signature) -> int:
    return signature.inputs[0].shape[0]


class OnNumbers(nn.Module):
    """Takes the first input only."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, numeric: Tensor, *_: Tensor) -> Tensor:
        return self.layers(numeric)


def batch_norm(signature: Signature) -> nn.Module:
    return OnNumbers(nn.Linear(numbers(signature), 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, signature.outputs))


class SometimesMore(OnNumbers):
    """Has a layer that takes no part, or one that takes part in batches with a large first number only."""

    def __init__(self, signature: Signature, ever: bool) -> None:
        super().__init__(nn.Linear(numbers(signature), 12), nn.ReLU(), nn.Linear(12, signature.outputs))
        self.ever = ever
        self.extra = nn.Linear(numbers(signature), signature.outputs)

    def forward(self, numeric: Tensor, *_: Tensor) -> Tensor:
        outputs = self.layers(numeric)
        # Zeros are what the model is tried on.
        if self.ever and (not numeric.any() or numeric[:, 0].max() > 1.5):
            outputs = outputs + self.extra(numeric)
        return outputs


def with_unused(signature: Signature) -> nn.Module:
    return SometimesMore(signature, ever=False)


def with_sometimes_unused(signature: Signature) -> nn.Module:
    return SometimesMore(signature, ever=True)


def never_compiled_again(signature: Signature) -> nn.Module:
    """Anything that is compiled a second time, as for another shape, is an error."""
    torch._dynamo.config.error_on_recompile = True
    return OnNumbers(nn.Linear(numbers(signature), 8), nn.ReLU(), nn.Linear(8, signature.outputs))


class NotesShapes(OnNumbers):
    """Notes the number of rows of every training pass in the file that ``NOTES`` names."""

    def forward(self, numeric: Tensor, *_: Tensor) -> Tensor:
        if self.training and numeric.any():
            with Path(os.environ["NOTES"]).open("a") as file:
                file.write(f"{len(numeric)}\n")
        return self.layers(numeric)


def notes_shapes(signature: Signature) -> nn.Module:
    return NotesShapes(nn.Linear(numbers(signature), signature.outputs))


class Fragile(OnNumbers):
    """The gradient of a row whose first number is 7 is no number, though its loss is one."""

    def forward(self, numeric: Tensor, *_: Tensor) -> Tensor:
        outputs = self.layers(numeric)
        return outputs + torch.sqrt((outputs[:, :1] * (numeric[:, :1] != 7)).square())


def fragile(signature: Signature) -> nn.Module:
    return Fragile(nn.Linear(numbers(signature), signature.outputs))
