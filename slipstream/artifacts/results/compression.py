"""Result of compressing a trained model, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.artifacts.results.export import Estimate


@dataclass(frozen=True)
class ModelSize:
    """Size of a model: its parameters, and the units (neurons or channels) of every layer before the last."""

    parameters: int
    units: list[int]


@dataclass(frozen=True)
class CompressionTrial:
    """Smaller model compared with the trained one on the validation rows.

    ``candidate`` counts from 0, the least compressed; ``value`` is its metric. The loss is in points of accuracy or
    percent of RMSE, with 95 % limits; ``answer`` is "passed", "failed" or "can't tell". ``seconds`` is its training
    time.
    """

    candidate: int
    name: str
    size: ModelSize
    value: float
    loss: float
    low: float
    high: float
    rows: int
    answer: str
    seconds: float


@dataclass(frozen=True)
class Compression:
    """Result of a compression.

    ``size`` and ``value`` are those of the trained model. ``speeds`` are those of the tried models by name, in torch
    with one thread at batches of ``batch`` rows. ``taken`` is the name of the smaller model, "" if the trained one
    stays, and ``why`` the reason; ``model`` is the chosen model's address. ``seconds`` covers all trainings; ``reused``
    is True if all had been done before.
    """

    method: str
    metric: Literal["accuracy", "rmse"]
    size: ModelSize
    value: float
    tried: list[CompressionTrial] = field(default_factory=list)
    speeds: dict[str, Estimate] = field(default_factory=dict)
    batch: int = 0
    taken: str = ""
    why: str = ""
    model: str = ""
    seconds: float = 0.0
    reused: bool = False
