"""Settings of model compression."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from slipstream.shared.comparison.config import GateConfig
from slipstream.shared.models.config import STORABLE, TeachingConfig, is_storable
from slipstream.shared.settings import Natural, settings
from slipstream.shared.spelling import NO_NUMBER, NONE

#: Maximum number of trainings of a search, which bisects the candidates: 4 trainings decide between 15 candidates.
ROUNDS = 4
MOST_CANDIDATES = 2**ROUNDS - 1


@settings
class CompressionConfig(GateConfig):
    """Settings of compression, which makes a trained model smaller.

    The smaller model is trained with the trained model as its teacher, by the settings of ``training`` except for those
    here.
    """

    section = "compression"

    method: Annotated[Literal["none", "prune", "distil"], NONE] = "none"
    """Compression after training: null, or "prune" removes units (neurons, channels), "distil" trains a smaller model
    from scratch."""
    share: Annotated[float, Field(ge=0, lt=1), NO_NUMBER] = 0.0
    """Fraction of the units of every layer that "prune" removes; null searches the largest whose loss is small
    enough."""
    # Bare dicts, as in slipstream.shared.models.config.
    students: Annotated[list[dict], Field(max_length=MOST_CANDIDATES)] = field(default_factory=list)
    """Arguments of the smaller models for "distil" that replace those of the trained one, such as {"hidden": [96, 48]}.
    With several, the smallest whose loss is small enough is searched. Without any, the built-in models are narrowed
    step by step."""
    epochs: Annotated[Natural, NO_NUMBER] = 0
    """Maximum number of epochs for a smaller model; null: as ``training.epochs``."""
    learning_rate: Annotated[float, Field(ge=0), NO_NUMBER] = 0.0
    """Largest learning rate for a smaller model; null: as ``training.learning_rate``."""
    minutes: Annotated[float, Field(gt=0)] = 60.0
    """Minutes of training after which no further model is trained. "distil" trains the best student on the labels
    alone, too, if that ends within them, and keeps the better one."""

    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    """Distillation of the trained model into the smaller one."""

    def check(self) -> None:
        if not is_storable(self.students):
            raise self.reject("students", STORABLE)

    @property
    def searches(self) -> bool:
        """True if the size is searched; False if the user named one candidate, which is taken whatever it loses."""
        return not self.share if self.method == "prune" else len(self.students) != 1
