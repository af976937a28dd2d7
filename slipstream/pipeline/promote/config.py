"""Settings of the promotion of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.shared.comparison.config import GateConfig
from slipstream.shared.settings import LATER, settings
from slipstream.shared.spelling import NO_TEXT


@settings
class PromotionConfig(GateConfig):
    """Conditions under which a new model replaces the model in service."""

    section = "promotion"

    max_loss: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Points of accuracy (or percent of RMSE) that a new model may lose against the promoted one, shown with 95 %
    confidence on the same test rows; below 0 it has to gain."""
    worse_than_baseline: Annotated[Literal["promote", "refuse"], LATER] = "promote"
    """Choice if the baseline of the evaluation is significantly better than the new model."""
    signing_key: Annotated[str, NO_TEXT] = ""
    """File of an Ed25519 private key (PEM) that signs models in the registry; in pods a mounted secret. null: none."""
