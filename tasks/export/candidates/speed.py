"""How fast candidates are, well enough to choose finalists: a glance at all of them, then longer looks at fewer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.artifacts.prepared.data import Signature
from tasks.export.candidates.candidate import Candidate
from tasks.export.config import ExportConfig
from tasks.export.session import onnx_predictor
from tasks.models.predict import Predictor
from tasks.timing.measure import GLANCES, glance

#: A variant is left out at a batch size if none of its turns came nearer to FP32's speed.
CLEARLY_SLOWER = 0.9
FP32 = "onnx-fp32"


@dataclass(frozen=True)
class Speeds:
    """What the speed of candidates is compared by: the file ``fp32`` on ``records``, as ``config`` says."""

    fp32: Path
    signature: Signature
    records: np.ndarray
    config: ExportConfig
    batches: Sequence[int]

    def look(self, candidates: Sequence[Candidate], deadline: float) -> None:
        """Glance at the candidates; what is clearly slower than FP32 at a batch size has no speed there. There is one
        round of turns at each, and no further one after ``deadline`` (``time.perf_counter``)."""
        if not candidates:
            return
        runs = self.loaded(candidates)
        for batch, until in self.shares(deadline):
            seen = glance(runs, FP32, self.signature, self.records, self.config.threads, batch, GLANCES, until)
            for candidate in candidates:
                if max(seen[candidate.name]) >= CLEARLY_SLOWER:
                    candidate.speed[batch] = statistics.median(seen[candidate.name])

    def rank(self, candidates: Sequence[Candidate], deadline: float) -> dict[int, list[Candidate]]:
        """By batch size the candidates that have a speed there, the fastest first.

        A glance takes the luckiest of many for the fastest. So the faster half is looked at again, for twice as many
        turns, and then the faster half of that, until one is left or ``deadline`` (``time.perf_counter``) is over.
        """
        runs, found = self.loaded(candidates), dict[int, list[Candidate]]()
        for batch, until in self.shares(deadline):
            field, slower, rounds = fastest_first(candidates, batch), list[Candidate](), GLANCES
            while len(field) > 1 and time.perf_counter() < until:
                rounds *= 2
                compared = {name: runs[name] for name in (FP32, *(each.name for each in field))}
                seen = glance(compared, FP32, self.signature, self.records, self.config.threads, batch, rounds, until)
                for candidate in field:
                    candidate.speed[batch] = statistics.median(seen[candidate.name])
                field = fastest_first(field, batch)
                half = -(-len(field) // 2)
                field, slower = field[:half], [*field[half:], *slower]
            found[batch] = [*field, *slower]
        return found

    def shares(self, deadline: float) -> Iterator[tuple[int, float]]:
        """The batch sizes, the smallest first, each with the end of its share of the time that is left."""
        for left, batch in zip(range(len(self.batches), 0, -1), sorted(self.batches), strict=True):
            now = time.perf_counter()
            yield batch, now + (deadline - now) / left

    def loaded(self, candidates: Sequence[Candidate]) -> Mapping[str, Predictor]:
        paths = {FP32: self.fp32, **{candidate.name: candidate.path for candidate in candidates}}
        return {name: onnx_predictor(path, self.config.threads, self.config.provider) for name, path in paths.items()}


def fastest_first(candidates: Sequence[Candidate], batch: int) -> list[Candidate]:
    return sorted((each for each in candidates if batch in each.speed), key=lambda each: -each.speed[batch])
