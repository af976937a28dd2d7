"""Result of compressing a trained model, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.shared.artifacts.results.export import Estimate
from slipstream.shared.artifacts.results.later import Later


@dataclass(frozen=True)
class ModelSize:
    """Size of a model: number of parameters, and units (neurons or channels) of every layer but the last."""

    parameters: int
    units: list[int]


@dataclass(frozen=True)
class CompressionTrial:
    """Smaller model compared with the trained one on the validation rows.

    ``candidate`` counts from 0, the least compressed. ``value`` is its accuracy or RMSE. ``loss`` is the loss of
    quality in points of accuracy or percent of RMSE, with its 95 % limits ``low`` and ``high``. ``answer`` is "passed",
    "failed" or "can't tell". ``seconds`` is its training time.
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
class TeachingGain:
    """Quality that the teacher gained for a student, against the same student trained on the labels alone.

    In points of accuracy or percent of RMSE (``units``) on the same validation ``rows``; each limit holds with 95 %.
    """

    gain: Estimate
    units: str
    rows: int
    kept: Literal["teacher", "labels"]

    def __str__(self) -> str:
        """Return the gain in words."""
        found, kept = self.gain, "its teacher" if self.kept == "teacher" else "the labels alone"
        return (
            f"its teacher gained {found.value:.2f} {self.units} ({found.low:.2f} to {found.high:.2f}) against the "
            f"labels alone, on {self.rows:,} validation rows, so the student of {kept} is kept"
        )


@dataclass(frozen=True)
class Compression:
    """Result of a compression.

    ``size`` and ``value`` are those of the trained model. ``speeds`` maps smaller models to their speedup over it, in
    torch with one thread at batches of ``batch`` rows. ``taken`` is the name of the smaller model, or "" if the trained
    one is kept; ``why`` is the reason and ``model`` the address of the chosen model. ``seconds`` is the time of all
    trainings; ``reused`` is True if all were done by an earlier run.
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
    #: None if the student was not trained on the labels alone, too.
    teaching: Later[TeachingGain] = None
