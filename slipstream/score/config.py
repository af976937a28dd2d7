"""Settings of scoring."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from slipstream.settings import Settings, settings


@settings
class ScoringConfig(Settings):
    """How the model in service is applied to new rows. They are read as the section data says."""

    section = "scoring"

    keep: list[str] = field(default_factory=list)
    """Columns of the rows that are written beside what the model says, as they are stored: an id, say."""
    drift: Annotated[float, Field(gt=0, le=10)] = 0.2
    """The population stability index above which a column, or the predictions, counts as drifted, if it is also more
    than the number of rows gives by chance."""
    public_key: str = ""
    """The file of the Ed25519 public key (PEM) by which the model has to be signed; in pods a mounted secret. Empty:
    signatures are not looked at."""

    def check(self) -> None:
        if len(set(self.keep)) < len(self.keep):
            raise self.reject("keep", "every column once")
