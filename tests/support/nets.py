"""Networks as users write them, for ``model.name``."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.models.plan import ParallelPlan, Style
from slipstream.shared.models.transformer import DecoderBlock, Transformer


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
    """Network with a layer that is unused, or used only in batches with a large first number."""

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
    """The gradient of a row whose first number is 7 is non-finite, though its loss is one."""

    def forward(self, numeric: Tensor, *_: Tensor) -> Tensor:
        outputs = self.layers(numeric)
        return outputs + torch.sqrt((outputs[:, :1] * (numeric[:, :1] != 7)).square())


def fragile(signature: Signature) -> nn.Module:
    return Fragile(nn.Linear(numbers(signature), signature.outputs))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Planned(nn.Module):
    """Takes numbers and codes; states how it is divided, and the deviations of its parameters."""

    def __init__(self, signature: Signature, depth: int = 4, width: int = 8, constant: str = "") -> None:
        super().__init__()
        self.width, self.classes, self.depth = width, signature.outputs, depth
        self.first: nn.Module | None = nn.Linear(numbers(signature), width)
        self.codes: nn.Module | None = nn.Embedding(8, width)
        self.blocks = nn.ModuleDict({str(number): ResidualBlock(width) for number in range(depth)})
        self.head: nn.Module | None = nn.Linear(width, self.classes)
        if constant == "buffer":
            self.register_buffer("mask", torch.ones(width), persistent=False)
        elif constant:
            self.mask = torch.ones(width)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        if self.first is not None and self.codes is not None:
            assert codes is not None
            x = self.first(x) + self.codes(codes).sum(dim=1)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def initial_std(self, name: str) -> float:
        return 0.0 if name.endswith("bias") else 0.3

    def plan(self) -> ParallelPlan:
        styles: dict[str, Style] = {"first": "head", "codes": "embedding", "head": "head"}
        for number in self.blocks:
            of_block: dict[str, Style] = {"": "region", ".0": "column", ".2": "row"}
            styles |= {f"blocks.{number}.inner{name}": style for name, style in of_block.items()}
        present = dict(self.named_modules())
        return ParallelPlan(
            blocks=tuple(f"blocks.{number}" for number in self.blocks),
            tensor={name: style for name, style in styles.items() if name in present},
            divisible={"width": self.width, "classes": self.classes},
            sequence=1,
            hidden=(self.width,),
            cut=self.cut,
        )

    def cut(self, start: int, stop: int) -> None:
        for number in range(self.depth):
            if not start <= number < stop:
                del self.blocks[str(number)]
        if start:
            self.first = self.codes = None
        if stop < self.depth:
            self.head = None


def planned(signature: Signature) -> nn.Module:
    return Planned(signature)


class PlannedForPictures(nn.Module):
    """Takes images; states the deviations of its parameters."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.first = nn.Conv2d(signature.inputs[0].shape[0], 4, 3)
        self.head = nn.Linear(4, signature.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).mean(dim=(2, 3)))

    def initial_std(self, name: str) -> float:
        return 0.1


class ScaledBlock(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.layer(x)


def with_scalars(signature: Signature) -> nn.Module:
    return OnNumbers(*(ScaledBlock(numbers(signature)) for _ in range(3)), nn.Linear(5, signature.outputs))


def with_shared(signature: Signature) -> nn.Module:
    blocks = [ResidualBlock(numbers(signature)) for _ in range(3)]
    blocks[2].inner[0].weight = blocks[0].inner[0].weight
    return OnNumbers(*blocks, nn.Linear(5, signature.outputs))


class DroppingBlock(DecoderBlock):
    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        return functional.dropout(super().forward(x, *more, **named), 0.2, self.training)


class Dropping(Transformer):
    """A transformer with dropout, whose plan and names are those of any other."""

    def __init__(self, signature: Signature, **arguments: object) -> None:
        super().__init__(signature, **arguments)  # type: ignore[arg-type]
        for block in self.model.layers.values():
            block.__class__ = DroppingBlock
