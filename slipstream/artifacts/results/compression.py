"""What became of the attempt to make a trained model smaller: what compression hands to the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.artifacts.results.export import Estimate


@dataclass(frozen=True)
class ModelSize:
    """How large a model is: its parameters, and the units (neurons or channels) of each layer before the last."""

    parameters: int
    units: list[int]


@dataclass(frozen=True)
class CompressionTrial:
    """A smaller model against the trained one, on the validation rows.

    ``candidate`` counts from 0, the least compressed; ``value`` is its metric. The loss is in points of accuracy or
    percent of RMSE, with limits of 95 % each; ``answer`` is "passed", "failed" or "can't tell". ``seconds`` are those
    of its training.
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
    """``size`` and ``value`` are those of the trained model, ``speeds`` those of the tried ones, by name, in torch
    with a thread at batches of ``batch`` rows.

    ``taken`` is the name of the smaller model, "" if the trained one stays, and ``why``; ``model`` is where the model
    that was chosen lies. ``seconds`` are those of all trainings, ``reused`` says that all had been done before.
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
