"""Settings of a quality gate, the same for export, compression and promotion."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.shared.settings import Settings, settings


@settings
class GateConfig(Settings):
    """Condition under which another model replaces the present one."""

    max_loss: Annotated[float, Field(ge=0)] = 1.0
    """Points of accuracy (or percent of RMSE) that the other model may lose: the one-sided 95 % upper limit of its
    loss, on the same rows, must be below."""
    when_in_doubt: Literal["keep", "take"] = "keep"
    """Choice if it is not significant whether the loss is within ``max_loss``: "keep" the present model (FP32, the
    trained or the promoted one), or "take" the other."""

    def passes(self, answer: str) -> bool:
        """Return True if a model with this :data:`.quality.Answer` may be taken."""
        return answer == "passed" or (answer == "can't tell" and self.when_in_doubt == "take")
