"""What became of the attempt to make a trained network smaller: what compression hands to the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tried:
    """A smaller network against the trained one, on the validation rows.

    ``candidate`` counts from 0, the least compressed. The loss is in points of accuracy or percent of RMSE, with limits
    of 95 % each; ``answer`` is "passed", "failed" or "can't tell". ``seconds`` are those of its training.
    """

    candidate: int
    name: str
    parameters: int
    loss: float
    low: float
    high: float
    rows: int
    answer: str
    seconds: float


@dataclass(frozen=True)
class Compression:
    """``taken`` is the name of the smaller network, "" if the trained one stays, and ``why``; ``model`` is where the
    model that was chosen lies."""

    method: str
    metric: str
    parameters: int
    tried: list[Tried] = field(default_factory=list)
    taken: str = ""
    why: str = ""
    model: str = ""
