"""What can be set about the export."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.settings import Settings, setting


@dataclass(frozen=True)
class ExportConfig(Settings):
    """Which variants are made, how they are measured and what the gate lets through."""

    section = "export"

    opset: int = setting(20, at_least=18, at_most=25)
    #: Rows of the training split that calibrate the INT8 variant.
    calibration_rows: int = setting(200, at_least=2)
    #: Points of accuracy (or percent of RMSE) that a faster variant may lose.
    max_loss: float = setting(1.0, at_least=0)
    #: How much faster than FP32 a quantised variant must be to be chosen.
    min_speedup: float = setting(1.0, above=0)
    #: The batch size whose median latency decides.
    decide_at_batch: int = setting(1, choices=(1, 256))
    threads: int = setting(1, at_least=1)
