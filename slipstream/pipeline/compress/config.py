"""Settings of model compression."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from slipstream.shared.models.config import STORABLE, TeachingConfig, is_storable
from slipstream.shared.settings import Natural, Settings, settings

#: Maximum number of trainings of a search, which bisects the candidates: 4 trainings decide between 15 candidates.
ROUNDS = 4
MOST_CANDIDATES = 2**ROUNDS - 1


@settings
class CompressionConfig(Settings):
    """Settings of compression, which makes a trained model smaller.

    The smaller model is trained with the trained model as its teacher, by the settings of ``training`` except for those
    here.
    """

    section = "compression"

    method: Literal["none", "prune", "distil"] = "none"
    """Compression after training: "prune" removes units (neurons, channels), "distil" trains a smaller model from
    scratch."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the units of every layer that "prune" removes; 0 searches the largest whose loss is small enough."""
    # Bare dicts, as in slipstream.shared.models.config.
    students: Annotated[list[dict], Field(max_length=MOST_CANDIDATES)] = field(default_factory=list)
    """Arguments of the smaller models for "distil" that replace those of the trained one, such as {"hidden": [96, 48]}.
    With several, the smallest whose loss is small enough is searched. Without any, the built-in models are narrowed
    step by step."""
    epochs: Natural = 0
    """Maximum number of epochs for a smaller model; 0: as ``training.epochs``."""
    learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Largest learning rate for a smaller model; 0: as ``training.learning_rate``."""
    max_loss: Annotated[float, Field(ge=0)] = 1.0
    """Points of accuracy (or percent of RMSE) that a searched model may lose against the trained one: the one-sided 95
    % limit has to be below."""
    when_in_doubt: Literal["keep", "take"] = "keep"
    """Choice if the loss of a searched model is not significant: "keep" the trained model, or "take" the searched
    one."""
    minutes: Annotated[float, Field(gt=0)] = 60.0
    """Minutes of training after which no further model is trained."""

    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    """Distillation of the trained model into the smaller one."""

    def check(self) -> None:
        if not is_storable(self.students):
            raise self.reject("students", STORABLE)

    @property
    def searches(self) -> bool:
        """True if the size is searched; False if the user named one candidate, which is taken whatever it loses."""
        return not self.share if self.method == "prune" else len(self.students) != 1
