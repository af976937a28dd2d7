"""Settings of the promotion of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.settings import Settings, settings


@settings
class PromotionConfig(Settings):
    """Conditions under which a new model replaces the one in service."""

    section = "promotion"

    max_loss: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Points of accuracy (or percent of RMSE) that it may lose against the promoted one, shown with 95 % confidence on
    the same test rows; below 0 it has to gain."""
    when_in_doubt: Literal["keep", "take"] = "keep"
    """What happens if the test rows are too few to tell."""
    signing_key: str = ""
    """The file of an Ed25519 private key (PEM) that signs what goes into the registry; in pods a mounted secret."""
