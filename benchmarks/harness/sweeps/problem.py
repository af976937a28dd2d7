"""Synthetic trainings with crossing learning curves: a large learning rate leads early and loses at the end."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EPOCHS = 27
RATE, DECAY = "training.learning_rate", "training.weight_decay"
HIDDEN, DROPOUT = "model.arguments.hidden", "model.arguments.dropout"
SPACE: dict[str, dict[str, Any]] = {
    RATE: {"low": 1e-4, "high": 1e-1, "log": True},
    HIDDEN: {"low": 16, "high": 512, "log": True},
    DROPOUT: {"low": 0.0, "high": 0.5},
    DECAY: {"low": 1e-6, "high": 1e-1, "log": True},
}
#: Settings of trial 0.
GIVEN = {RATE: 2e-3, HIDDEN: 64, DROPOUT: 0.1, DECAY: 1e-2}
#: Increase of the last loss per squared distance from the best value; distances are at most 1.
MATTERS = {RATE: 0.6, HIDDEN: 0.2, DROPOUT: 0.1, DECAY: 0.05}
BEST_LOSS, FALL, NOISE = 0.1, 0.9, 0.003


def position(path: str, value: float) -> float:
    """Return where a value lies in its (possibly logarithmic) range, from 0 to 1."""
    bounds = SPACE[path]
    low, high = bounds["low"], bounds["high"]
    if bounds.get("log"):
        return math.log(value / low) / math.log(high / low)
    return float((value - low) / (high - low))


@dataclass(frozen=True)
class Problem:
    """Synthetic tuning problem with random best settings and evaluation noise, both determined by the seed."""

    seed: int

    def loss(self, values: Mapping[str, Any], epoch: int) -> float:
        """Return the loss after ``epoch`` epochs, with noise that is the same for equal settings."""
        settings = GIVEN | dict(values)
        noise = random.Random(f"{self.seed} {sorted(settings.items())} {epoch}")
        return self.noiseless(values, epoch) + noise.gauss(0.0, NOISE)

    def noiseless(self, values: Mapping[str, Any], epoch: int = EPOCHS) -> float:
        places = {path: position(path, value) for path, value in (GIVEN | dict(values)).items()}
        best = random.Random(f"best {self.seed}")
        off = {path: places[path] - best.uniform(0.3, 0.7) for path in sorted(places)}
        last = BEST_LOSS + sum(MATTERS[path] * off[path] ** 2 for path in off)
        return last + FALL * math.exp(-(0.25 + 0.35 * places[RATE]) * epoch)

    def epoch_time(self, values: Mapping[str, Any]) -> float:
        """Return the virtual time of an epoch, which grows with the hidden width.

        A whole training takes 0.8 for the smallest width, 1 in the middle of the range, and 1.2 for the largest.
        """
        return (0.8 + 0.4 * position(HIDDEN, (GIVEN | dict(values))[HIDDEN])) / EPOCHS

    def crossing(self, pairs: int) -> float:
        """Return the fraction of ``pairs`` random pairs of settings whose order changes after the first epoch."""
        draw = random.Random(f"pairs {self.seed}")

        def drawn() -> dict[str, float]:
            values = {}
            for path, bounds in SPACE.items():
                low, high = float(bounds["low"]), float(bounds["high"])
                at = draw.random()
                values[path] = low * (high / low) ** at if bounds.get("log") else low + at * (high - low)
            return values

        crossed = 0
        for _ in range(pairs):
            one, other = drawn(), drawn()
            early = self.noiseless(one, 1) < self.noiseless(other, 1)
            crossed += early != (self.noiseless(one) < self.noiseless(other))
        return crossed / pairs
