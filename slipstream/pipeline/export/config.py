"""Settings of the export."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.shared.comparison.config import GateConfig
from slipstream.shared.settings import LARGEST, LATER, Positive, settings
from slipstream.shared.spelling import NO_NUMBER, NO_TEXT


@settings
class ExportConfig(GateConfig):
    """Settings of the variants, their measurement and the gate."""

    section = "export"

    most_parameters: Positive = 500_000_000
    """Maximum number of parameters for ONNX variants, as an ONNX file holds 2 GiB. A larger model is exported only as
    files of Hugging Face's libraries."""
    opset: Annotated[int, Field(ge=18, le=25)] = 20
    """ONNX operator set version of the model."""
    target: Literal["portable", "vnni"] = "portable"
    """CPUs that INT8 variants are for: "portable" uses 7-bit weights, with which every CPU computes the same numbers;
    "vnni" uses 8 bits, with which x86 CPUs without VNNI compute wrong numbers."""
    calibration_rows: Annotated[int, Field(ge=16, le=LARGEST)] = 200
    """Rows of the training split that calibrate static INT8 variants; a training split of fewer than 16 rows gives
    none."""
    evidence: Literal["test", "test+validation"] = "test"
    """Splits whose rows measure the loss. The validation split was also used to select weights and finalists, so it is
    biased."""
    optimise: Literal["latency", "throughput", "size", "cost"] = "latency"
    """Criterion for the best variant at ``decide_at_batch``: median latency, rows per second ("throughput" and "cost",
    which give the same order), or file size."""
    decide_at_batch: Literal[1, 32, 256] = 1
    """Batch size at which the variant is chosen."""
    min_speedup: Annotated[float, Field(gt=0)] = 1.05
    """Required speedup over FP32, by its lower 95 % limit; ignored with ``optimise: size``."""
    mix_requests: Annotated[bool, LATER] = False
    """Let Triton batch requests also if a row's answer depends on the other rows of its call, as for dynamic INT8."""
    budget_ms: Annotated[float, Field(ge=0), NO_NUMBER] = 0.0
    """Maximum latency in milliseconds of a call with ``decide_at_batch`` rows; null: no limit."""
    budget_percentile: Literal["p50", "p90", "p99"] = "p50"
    """Percentile of the latency that ``budget_ms`` limits."""
    budget_mb: Annotated[float, Field(ge=0), NO_NUMBER] = 0.0
    """Maximum file size, in 1e6 bytes; null: no limit."""
    price_per_hour: Annotated[float, Field(ge=0), NO_NUMBER] = 0.0
    """Price per hour of the measured threads, from which the price per million predictions is computed; null: not
    reported."""
    provider: Literal["cpu", "cuda"] = "cpu"
    """Device that runs and times variants. "cuda" tries FP16 and BF16, and needs onnxruntime-gpu in place of
    onnxruntime."""
    half: bool = False
    """Also write FP16 and BF16 files for GPUs; on a CPU they are checked but not timed."""
    tensorrt: bool = False
    """Also write an INT8 file for TensorRT (symmetric, not timed) and the ``trtexec`` line that builds its engine."""
    seconds: Annotated[float, Field(gt=0)] = 20.0
    """Approximate total seconds for making and timing all variants."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of ONNX Runtime during measurements."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of a transformer's weights in hugging-face/, to which measured weights are rounded, too: "auto" is that of
    the base, or float32 without one."""
    licence: Annotated[str, NO_TEXT] = ""
    """Licence that is recorded in the model's files, such as "Apache-2.0"; null: none."""
    sample_rows: Literal["drawn", "real"] = "drawn"
    """Rows exported for ``slipstream check``: "drawn" at random from schema and vocabularies, or "real" rows of the
    test split."""

    def check(self) -> None:
        if self.optimise == "cost" and not self.price_per_hour:
            raise self.reject("price_per_hour", "a price above 0, as export.optimise is cost")
