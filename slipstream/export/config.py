"""Settings of the export."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.settings import LARGEST, Positive, Settings, settings


@settings
class ExportConfig(Settings):
    """Settings of the variants, their measurement and the gate."""

    section = "export"

    most_parameters: Positive = 500_000_000
    """Maximum number of parameters for ONNX variants, as an ONNX file holds 2 GiB. A larger model is exported only as
    files of Hugging Face's libraries."""
    opset: Annotated[int, Field(ge=18, le=25)] = 20
    """Version of the ONNX operators of the model."""
    target: Literal["portable", "vnni"] = "portable"
    """CPUs for INT8 variants: with "portable" weights have 7 bits and every CPU computes the same numbers; "vnni" takes
    8 bits, with which x86 CPUs without VNNI compute wrong numbers."""
    calibration_rows: Annotated[int, Field(ge=16, le=LARGEST)] = 200
    """Rows of the training split that calibrate the INT8 variants; with fewer than 16 none is calibrated."""
    max_loss: Annotated[float, Field(ge=0)] = 1.0
    """Points of accuracy (or percent of RMSE) that a variant may lose: the one-sided 95 % limit has to be below."""
    when_in_doubt: Literal["keep", "take"] = "keep"
    """Choice if the loss of a variant is not significant: "keep" FP32, or "take" the variant."""
    evidence: Literal["test", "test+validation"] = "test"
    """Rows that measure the loss. The validation split was also used to choose the weights and the finalists."""
    optimise: Literal["latency", "throughput", "size", "cost"] = "latency"
    """Criterion for the best variant at ``decide_at_batch``: median latency, rows per second (or per price, with the
    same order), or file size."""
    decide_at_batch: Literal[1, 32, 256] = 1
    """Batch size for the choice."""
    min_speedup: Annotated[float, Field(gt=0)] = 1.05
    """Required speedup over FP32, at the lower 95 % limit; not for ``optimise: size``."""
    budget_ms: Annotated[float, Field(ge=0)] = 0.0
    """Maximum milliseconds of a call with ``decide_at_batch`` rows; 0 sets no limit."""
    budget_percentile: Literal["p50", "p90", "p99"] = "p50"
    """Percentile of the latency that ``budget_ms`` limits."""
    budget_mb: Annotated[float, Field(ge=0)] = 0.0
    """Maximum file size, in 1e6 bytes; 0 sets no limit."""
    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price of the measured threads per hour, for the price per million predictions; 0: no price is reported."""
    provider: Literal["cpu", "cuda"] = "cpu"
    """Device that runs and times variants: on a GPU ("cuda", with onnxruntime-gpu in place of onnxruntime) FP16 and
    BF16 are tried."""
    half: bool = False
    """Also write FP16 and BF16 files for GPUs; a run on a CPU checks them without timing."""
    tensorrt: bool = False
    """Also write an INT8 file for TensorRT (symmetric, not timed) and the ``trtexec`` line that builds its engine."""
    seconds: Annotated[float, Field(gt=0)] = 20.0
    """Approximate time for making and timing all variants, in seconds."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of ONNX Runtime during measurements."""
    licence: str = ""
    """Licence of the model in its files, such as "Apache-2.0"."""
    sample_rows: Literal["drawn", "real"] = "drawn"
    """Rows that are exported to check the model: drawn from its schema and vocabularies, or rows of the test split."""

    def check(self) -> None:
        if self.optimise == "cost" and not self.price_per_hour:
            raise self.reject("price_per_hour", "a price above 0, as export.optimise is cost")
