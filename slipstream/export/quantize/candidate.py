"""A quantised file that may become a finalist."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slipstream.export.quantize.recipes import Recipe


@dataclass
class ExportCandidate:
    """A quantised file, its loss on the rows of the search, and its estimated speedup over FP32 by batch size."""

    name: str
    recipe: Recipe
    path: Path
    loss: float
    speed: dict[int, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size
