"""Built-in models for tables (MLP with embeddings of columns) and for images (small ResNet)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.models.config import DEEPEST


class PeriodicEmbedding(nn.Module):
    """Periodic embedding of numbers: sines and cosines of learned frequencies and a linear layer per column (PLR).

    Takes ``[batch, F]``, returns ``[batch, F * width]``. It helps to fit abrupt changes along a column, as trees do
    (Gorishniy et al. 2022, "On Embeddings for Numerical Features in Tabular Deep Learning").
    """

    def __init__(self, features: int, frequencies: int = 16, width: int = 8, scale: float = 0.3) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(features, frequencies) * scale)
        self.weight = nn.Parameter(torch.randn(features, 2 * frequencies, width) / math.sqrt(2 * frequencies))
        self.bias = nn.Parameter(torch.zeros(features, 1, width))

    def forward(self, numeric: Tensor) -> Tensor:
        angles = 2 * math.pi * numeric.unsqueeze(2) * self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=2)
        mixed = torch.matmul(waves.transpose(0, 1), self.weight) + self.bias
        return torch.relu(mixed).transpose(0, 1).flatten(1)


class MeanEmbedding(nn.Module):
    """Mean of a text's word embeddings.

    Takes int32 ``[batch, D, length]``, 0 for padding; returns ``[batch, D * width]``. ``nn.EmbeddingBag`` is not used,
    so that every ONNX runtime supports the operators.
    """

    def __init__(self, buckets: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(buckets, width)
        # Small, because embeddings of words that do not occur in training keep these values.
        nn.init.normal_(self.embedding.weight, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens != 0).unsqueeze(3).to(torch.float32)
        total = (self.embedding(tokens) * present).sum(dim=2)
        return (total / present.sum(dim=2).clamp(min=1)).flatten(1)


class MLP(nn.Module):
    """Multilayer perceptron over numbers, their periodic embeddings, and embedded categories and texts.

    Hidden layers are Linear, LayerNorm and ReLU. Inputs are ``numeric`` (float32 ``[batch, F]``), ``categorical``
    (int32 ``[batch, C]``) and ``tokens`` (int32 ``[batch, D, length]``), in this order, as far as the data has them;
    returns ``[batch, outputs]``. Without batch statistics the result does not depend on how a batch is divided among
    processes.

    Args:
        signature: Inputs and outputs of the model.
        hidden: Units of the hidden layers, in order.
        frequencies: Learned frequencies of every number's periodic embedding; 0 for none.
        dropout: Probability of dropout after every hidden layer.
        word_width: Width of the embeddings of words.
    """

    def __init__(
        self,
        signature: Signature,
        hidden: tuple[int, ...] = (256, 128),
        frequencies: int = 16,
        dropout: float = 0.0,
        word_width: int = 32,
    ) -> None:
        super().__init__()
        shapes = {spec.name: spec.shape for spec in signature.inputs}
        self.takes = tuple(shapes)
        sizes = [(cardinality, embedding_width(cardinality)) for cardinality in signature.cardinalities]
        embeddings = [nn.Embedding(cardinality, width) for cardinality, width in sizes]
        for embedding in embeddings:
            nn.init.normal_(embedding.weight, std=0.1)
        self.embeddings = nn.ModuleList(embeddings)
        numbers = sum(shapes.get("numeric", (0,)))
        self.periodic = PeriodicEmbedding(numbers, frequencies) if numbers and frequencies else None
        width = numbers + sum(width for _, width in sizes)
        self.bag = MeanEmbedding(signature.buckets, word_width) if "tokens" in shapes else None
        if self.bag:
            width += shapes["tokens"][0] * word_width
        if self.periodic:
            width += self.periodic.bias.numel()
        layers: list[nn.Module] = []
        for units in hidden:
            layers += [nn.Linear(width, units), nn.LayerNorm(units), nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            width = units
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, signature.outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        by_name = dict(zip(self.takes, inputs, strict=True))
        parts = []
        if "numeric" in by_name:
            parts.append(by_name["numeric"])
            if self.periodic:
                parts.append(self.periodic(by_name["numeric"]))
        if "categorical" in by_name:
            codes = by_name["categorical"]
            parts += [embedding(codes[:, column]) for column, embedding in enumerate(self.embeddings)]
        if self.bag:
            parts.append(self.bag(by_name["tokens"]))
        return self.head(self.layers(torch.cat(parts, dim=1)))


def embedding_width(cardinality: int) -> int:
    """Return the width of an embedding, at most 32, by fastai's rule (fastai.tabular.model.emb_sz_rule)."""
    return min(32, round(1.6 * cardinality**0.56))


def normalised(channels: int, norm: str) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(min(8, channels), channels)


class ResidualBlock(nn.Module):
    """Residual block of two 3x3 convolutions; the first convolution and the shortcut have the stride."""

    def __init__(self, channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = normalised(out_channels, norm)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = normalised(out_channels, norm)
        same = stride == 1 and channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Small residual network for standardised images.

    Takes ``[batch, channels, height, width]`` of at least 4x4; returns ``[batch, outputs]``.

    Args:
        signature: Inputs and outputs of the model.
        widths: Channels of the stages; every stage after the first halves height and width.
        depth: Residual blocks of every stage.
        norm: Normalisation: with "group" the result does not depend on how a batch is divided among processes. With
            "batch" it does, but the export folds it into the convolutions: a faster model, especially in INT8.

    Raises ``ValueError`` for another ``norm``, and for "batch" if images are so small that a batch of one row would
    leave one value per channel.
    """

    def __init__(
        self, signature: Signature, widths: tuple[int, ...] = (16, 32, 64), depth: int = 1, norm: str = "group"
    ) -> None:
        super().__init__()
        if norm not in ("group", "batch"):
            raise ValueError(f'norm is {norm!r}; expected "group" or "batch"')
        if not 1 <= depth * len(widths) <= DEEPEST:
            raise ValueError(f"{len(widths)} widths with a depth of {depth}; expected 1 to {DEEPEST} blocks in all")
        smallest = 2 ** (len(widths) - 1)
        if norm == "batch" and max(signature.inputs[0].shape[1:]) <= smallest:
            raise ValueError(f'norm: "batch" needs images larger than {smallest} x {smallest} with these widths')
        channels = signature.inputs[0].shape[0]
        self.stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.norm = normalised(widths[0], norm)
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            for index in range(depth):
                blocks.append(ResidualBlock(channels, width, stride=2 if stage and not index else 1, norm=norm))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, signature.outputs)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(image)))
        return self.head(self.blocks(x).mean(dim=(2, 3)))
