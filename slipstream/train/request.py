"""What one attempt at training is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.artifacts.homes import Holder
from slipstream.models.config import ModelConfig, TeachingConfig
from slipstream.train.config import TrainingConfig


@dataclass(frozen=True)
class TrainingRequest:
    """One attempt at training a model."""

    #: A directory with the prepared data, or a stub of it.
    prepared: Path
    model: ModelConfig
    training: TrainingConfig
    #: Where rank 0 writes the trained model.
    directory: Path
    #: The home of the checkpoints, a path or a store's address.
    home: str
    #: What goes into the manifest of the trained model.
    made_by: Mapping[str, Any]
    #: Who this is, to other attempts at the same training.
    holder: Holder = Holder()
    #: Whether somebody else holds the home from the end of the training until the trained model is where it belongs.
    delivered_by_agent: bool = False
    #: The cloud whose preemption notices are watched for; "auto" tries all, "none" does not watch.
    notices: str = "none"
    #: Seconds that SIGTERM leaves to save and end.
    grace_s: float = 25.0
    #: A trained model that training goes on from: its network and weights, instead of fresh ones of ``model``.
    start: Path | None = None
    #: A trained model to learn from, too, and how.
    teacher: Path | None = None
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    #: The factory of the user's configuration, the only one from outside this project that these two may be made by.
    factory: str = ""
