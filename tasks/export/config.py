"""What can be set about the export."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tasks.settings import Settings, settings


@settings
class ExportConfig(Settings):
    """Which variants are made, how they are measured and what the gate lets through."""

    section = "export"

    opset: Annotated[int, Field(ge=18, le=25)] = 20
    """The version of the ONNX operators that the model is written in."""
    calibration_rows: Annotated[int, Field(ge=2)] = 200
    """Rows of the training split that calibrate the INT8 variant."""
    max_loss: Annotated[float, Field(ge=0)] = 1.0
    """Points of accuracy (or percent of RMSE) that a faster variant may lose."""
    min_speedup: Annotated[float, Field(gt=0)] = 1.0
    """How much faster than FP32 a quantised variant must be to be chosen."""
    decide_at_batch: Literal[1, 256] = 1
    """The batch size whose median latency decides."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Threads of ONNX Runtime while it is measured."""
