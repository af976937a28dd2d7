"""The settings of the model."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated

from pydantic import Field

from slipstream.settings import Settings, settings

#: What numbers in arguments of models are, which have no types here: what JSON and Flyte's encoding hold.
STORABLE = "finite numbers, integers of at most 64 bits"


@settings
class ModelConfig(Settings):
    """Which model is trained."""

    section = "model"

    name: str = "auto"
    """The model: "auto" takes the MLP for tables, the ResNet for images and the transformer for rows of tokens;
    otherwise "mlp", "resnet", "transformer", or your own as "package.module:factory", a function or a class that this
    module defines, called with the Signature and the arguments. A trained model of your own factory is only opened with
    this setting."""
    # A bare dict: flytekit warns of pickles at every start if it finds an Any in a type.
    arguments: dict = field(default_factory=dict)
    """Keyword arguments of the factory."""

    def check(self) -> None:
        if odd := next((name for name in self.arguments if not isinstance(name, str)), None):
            raise self.reject("arguments", f"names of keyword arguments, not {odd!r}")
        if not all(map(is_storable, self.arguments.values())):
            raise self.reject("arguments", STORABLE)
        builtin = ("auto", "mlp", "resnet", "transformer")
        module, colon, factory = self.name.partition(":")
        if self.name not in builtin and not (module and colon and factory.isidentifier()):
            raise self.reject("name", f"one of {', '.join(builtin)}, or your own as 'package.module:factory'")

    @property
    def factory(self) -> str:
        """The factory from outside this project that is named; "" for the built-in models."""
        return self.name if ":" in self.name else ""


@settings
class TeachingConfig(Settings):
    """How much a model learns from a larger one, its teacher, instead of from the labels."""

    section = "compression.teaching"

    weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The teacher's share of the loss; the rest is that of the labels. 0 leaves the teacher out."""
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """What both models' logits are divided by before they are compared: more shows more of what the teacher finds
    unlikely. Not for regressions."""


def is_storable(value: object) -> bool:
    """Whether all numbers in an argument of a model are :data:`STORABLE`."""
    if isinstance(value, dict | list | tuple):
        return all(map(is_storable, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or -(2**63) <= value < 2**64
