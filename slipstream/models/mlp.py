"""A multilayer perceptron for tables and texts, with an embedding for each column."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from slipstream.artifacts.prepared.data import Signature


class Periodic(nn.Module):
    """Embeds each number by sines and cosines of learned frequencies and a linear layer per column (PLR).

    Takes ``[batch, F]``, returns ``[batch, F * width]``. It helps a network to fit functions that change abruptly along
    one column, as trees do (Gorishniy et al. 2022, "On Embeddings for Numerical Features in Tabular Deep Learning").
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


class Bag(nn.Module):
    """The mean embedding of a text's words: takes int32 ``[batch, D, length]``, 0 for padding; returns
    ``[batch, D * width]``.

    It does not use ``nn.EmbeddingBag``, so that every ONNX runtime supports its operators.
    """

    def __init__(self, buckets: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(buckets, width)
        # Small, because the embeddings of words that do not occur in training stay as they are.
        nn.init.normal_(self.embedding.weight, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens != 0).unsqueeze(3).to(torch.float32)
        total = (self.embedding(tokens) * present).sum(dim=2)
        return (total / present.sum(dim=2).clamp(min=1)).flatten(1)


class MLP(nn.Module):
    """Concatenates numbers, their periodic embeddings, embedded categories and texts; then blocks of Linear, LayerNorm
    and
    ReLU.

    Takes those of ``numeric`` (float32 ``[batch, F]``), ``categorical`` (int32 ``[batch, C]``) and ``tokens`` (int32
    ``[batch, D, length]``) that the data has, in this order; returns ``[batch, outputs]``. Layer normalisation uses no
    statistics of the batch, so the result does not depend on how a batch is divided among processes.
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
        self.periodic = Periodic(numbers, frequencies) if numbers and frequencies else None
        width = numbers + sum(width for _, width in sizes)
        self.bag = Bag(signature.buckets, word_width) if "tokens" in shapes else None
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
        given = dict(zip(self.takes, inputs, strict=True))
        parts = []
        if "numeric" in given:
            parts.append(given["numeric"])
            if self.periodic:
                parts.append(self.periodic(given["numeric"]))
        if "categorical" in given:
            codes = given["categorical"]
            parts += [embedding(codes[:, column]) for column, embedding in enumerate(self.embeddings)]
        if self.bag:
            parts.append(self.bag(given["tokens"]))
        return self.head(self.layers(torch.cat(parts, dim=1)))


def embedding_width(cardinality: int) -> int:
    """Width of an embedding, by fastai's rule of thumb (fastai.tabular.model.emb_sz_rule), at most 32."""
    return min(32, round(1.6 * cardinality**0.56))
