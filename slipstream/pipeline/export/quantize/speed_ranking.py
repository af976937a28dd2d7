"""Speed estimates of candidates by successive halving, to choose the finalists.

All are timed briefly, then the faster half for twice as long, and so on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.quantize.recipes import Recipe
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.comparison.latencies import SCREENING_ROUNDS, Workload, screen_speedups
from slipstream.shared.models.predict import ModelFunction


@dataclass
class ExportCandidate:
    """Quantised file with its loss on the search rows and its speedup over FP32 by batch size."""

    name: str
    recipe: Recipe
    path: Path
    loss: float
    speed: dict[int, float] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """Recipe code; for mixed-precision files also the number of FP32 layers."""
        return self.path.name.removeprefix("model.").removesuffix(".onnx")

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


#: A candidate that never reaches this speed, relative to FP32, at a batch size is dropped there.
CLEARLY_SLOWER = 0.9
FP32 = "onnx-fp32"


@dataclass(frozen=True)
class SpeedRanking:
    """Speeds of candidates relative to the file ``fp32``, on ``records`` under ``config``."""

    fp32: Path
    signature: Signature
    records: np.ndarray
    config: ExportConfig
    batches: Sequence[int]

    @property
    def workload(self) -> Workload:
        return Workload(self.signature, self.records, self.config.threads)

    def screen(self, candidates: Sequence[ExportCandidate], deadline: float) -> None:
        """Set the candidates' speeds, except at batch sizes at which they are clearly slower than FP32.

        Every batch size gets at least one round; none starts after ``deadline`` (``time.perf_counter``).
        """
        if not candidates:
            return
        runs = self.loaded(candidates)
        for batch, until in self.shares(deadline):
            seen = screen_speedups(runs, FP32, self.workload, batch, SCREENING_ROUNDS, until)
            for candidate in candidates:
                if max(seen[candidate.name]) >= CLEARLY_SLOWER:
                    candidate.speed[batch] = statistics.median(seen[candidate.name])

    def rank(self, candidates: Sequence[ExportCandidate], deadline: float) -> dict[int, list[ExportCandidate]]:
        """Return, by batch size, the candidates with a speed, fastest first.

        The fastest of many short measurements may only be lucky. So the faster half is measured again for twice as many
        rounds, until one is left or ``deadline`` (``time.perf_counter``) has passed.
        """
        runs, ranked = self.loaded(candidates), dict[int, list[ExportCandidate]]()
        for batch, until in self.shares(deadline):
            field, slower, rounds = fastest_first(candidates, batch), list[ExportCandidate](), SCREENING_ROUNDS
            while len(field) > 1 and time.perf_counter() < until:
                rounds *= 2
                compared = {name: runs[name] for name in (FP32, *(each.name for each in field))}
                seen = screen_speedups(compared, FP32, self.workload, batch, rounds, until)
                for candidate in field:
                    candidate.speed[batch] = statistics.median(seen[candidate.name])
                field = fastest_first(field, batch)
                half = -(-len(field) // 2)
                field, slower = field[:half], [*field[half:], *slower]
            ranked[batch] = [*field, *slower]
        return ranked

    def shares(self, deadline: float) -> Iterator[tuple[int, float]]:
        """Yield the batch sizes, smallest first, with the time at which each should end."""
        for left, batch in zip(range(len(self.batches), 0, -1), sorted(self.batches), strict=True):
            now = time.perf_counter()
            yield batch, now + (deadline - now) / left

    def loaded(self, candidates: Sequence[ExportCandidate]) -> Mapping[str, ModelFunction]:
        paths = {FP32: self.fp32, **{candidate.name: candidate.path for candidate in candidates}}
        return {name: onnx_predictor(path, self.config.threads, self.config.provider) for name, path in paths.items()}


def fastest_first(candidates: Sequence[ExportCandidate], batch: int) -> list[ExportCandidate]:
    return sorted((each for each in candidates if batch in each.speed), key=lambda each: -each.speed[batch])
