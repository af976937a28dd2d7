"""Settings of scoring."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field

from slipstream.shared.settings import Settings, settings
from slipstream.shared.spelling import NO_TEXT


@settings
class ScoringConfig(Settings):
    """Settings for scoring new rows with the model in service; how rows are read is set in the section "data"."""

    section = "scoring"

    keep: list[str] = field(default_factory=list)
    """Columns of the rows, such as an id, to copy unchanged next to the predictions."""
    drift: Annotated[float, Field(gt=0, le=10)] = 0.2
    """Population stability index above which a column, or the predictions, counts as drifted, if it also exceeds the
    value expected by chance for the number of rows."""
    public_key: Annotated[str, NO_TEXT] = ""
    """File of the Ed25519 public key (PEM) that must have signed the model; in pods a mounted secret. null: signatures
    are not checked."""

    def check(self) -> None:
        if len(set(self.keep)) < len(self.keep):
            raise self.reject("keep", "every column once")
