"""Settings of model compression."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from slipstream.models.config import STORABLE, TeachingConfig, is_storable
from slipstream.settings import Natural, Settings, settings

#: Most candidates that are trained: the search halves the rest every time.
ROUNDS = 4
MOST_CANDIDATES = 2**ROUNDS - 1


@settings
class CompressionConfig(Settings):
    """Settings of making a trained model smaller.

    The smaller model is trained with the larger as its teacher, by the settings of ``training`` except for those here.
    """

    section = "compression"

    method: Literal["none", "prune", "distil"] = "none"
    """What the main job does after training: "prune" removes units (neurons, channels), "distil" trains a smaller
    model from scratch."""
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the units of each layer that "prune" removes; 0 searches the largest that loses little enough."""
    # Bare dicts, as in slipstream.models.config.
    students: Annotated[list[dict], Field(max_length=MOST_CANDIDATES)] = field(default_factory=list)
    """Arguments of the smaller models for "distil", laid over those of the trained one, such as {"hidden": [96, 48]};
    of several the smallest that loses little enough is searched. Without any, the built-in models are made narrower,
    step by step."""
    epochs: Natural = 0
    """The most passes over the training split for a smaller model; 0: as ``training.epochs``."""
    learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """The largest learning rate for a smaller model; 0: as ``training.learning_rate``."""
    max_loss: Annotated[float, Field(ge=0)] = 1.0
    """Points of accuracy (or percent of RMSE) that a searched model may lose against the trained one: the one-sided
    95 % limit has to lie below."""
    when_in_doubt: Literal["keep", "take"] = "keep"
    """What is done if the rows cannot tell whether a searched model loses more: keep the trained one, or take it."""
    minutes: Annotated[float, Field(gt=0)] = 60.0
    """No further model is trained once those before have taken so long."""

    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    """How much the smaller model learns from the trained one."""

    def check(self) -> None:
        if not is_storable(self.students):
            raise self.reject("students", STORABLE)

    @property
    def searches(self) -> bool:
        """True if the size is searched; else one candidate was named, and is taken whatever it loses."""
        return not self.share if self.method == "prune" else len(self.students) != 1
