"""Settings of the export."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slipstream.settings import LARGEST, Positive, Settings, settings


@settings
class ExportConfig(Settings):
    """Which variants are made, how they are measured and what the gate lets through."""

    section = "export"

    most_parameters: Positive = 500_000_000
    """The most parameters of a model of which ONNX variants are made, as that format holds 2 GiB; a larger one leaves
    as the files of Hugging Face's libraries alone."""
    opset: Annotated[int, Field(ge=18, le=25)] = 20
    """The version of the ONNX operators that the model is written in."""
    target: Literal["portable", "vnni"] = "portable"
    """The CPUs that INT8 variants are for: with "portable" their weights have 7 bits and every CPU computes the same
    numbers; "vnni" takes 8 bits, which x86 CPUs without VNNI would compute wrongly."""
    calibration_rows: Annotated[int, Field(ge=16, le=LARGEST)] = 200
    """Rows of the training split that calibrate the INT8 variants; with fewer than 16 none is calibrated."""
    max_loss: Annotated[float, Field(ge=0)] = 1.0
    """Points of accuracy (or percent of RMSE) that a variant may lose: the one-sided 95 % limit has to lie below."""
    when_in_doubt: Literal["keep", "take"] = "keep"
    """What is done if the rows cannot tell whether a variant loses more: keep FP32, or take the variant."""
    evidence: Literal["test", "test+validation"] = "test"
    """The rows that the loss is judged on. The validation split also chose the weights and the finalists."""
    optimise: Literal["latency", "throughput", "size", "cost"] = "latency"
    """What makes a variant the best at ``decide_at_batch``: its median latency, rows per second (or per price, which is
    the same order), or the size of its file."""
    decide_at_batch: Literal[1, 32, 256] = 1
    """The batch size that decides."""
    min_speedup: Annotated[float, Field(gt=0)] = 1.05
    """How many times as fast as FP32 a variant must be, at the lower 95 % limit; not for ``optimise: size``."""
    budget_ms: Annotated[float, Field(ge=0)] = 0.0
    """The most milliseconds of a call of ``decide_at_batch`` rows; 0 sets no limit."""
    budget_percentile: Literal["p50", "p90", "p99"] = "p50"
    """The percentile of the latency that ``budget_ms`` limits."""
    budget_mb: Annotated[float, Field(ge=0)] = 0.0
    """The largest file, in 1e6 bytes; 0 sets no limit."""
    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """What an hour of the measured threads costs, for the price per million predictions; 0: no price is told."""
    provider: Literal["cpu", "cuda"] = "cpu"
    """Where variants run and are timed: on a GPU ("cuda", with onnxruntime-gpu in place of onnxruntime) FP16
    and BF16 are tried."""
    half: bool = False
    """Also write FP16 and BF16 files for GPUs, which a run on a CPU checks and does not time."""
    tensorrt: bool = False
    """Also write an INT8 file for TensorRT (symmetric, not timed) and the ``trtexec`` line that builds its engine."""
    seconds: Annotated[float, Field(gt=0)] = 20.0
    """About how long variants are made and timed, altogether."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of ONNX Runtime while it is measured."""
    licence: str = ""
    """The licence of the model, such as "Apache-2.0", which its files name."""
    sample_rows: Literal["drawn", "real"] = "drawn"
    """The rows that travel with the model to check it by: drawn from its schema and vocabularies, or rows of the test
    split."""

    def check(self) -> None:
        if self.optimise == "cost" and not self.price_per_hour:
            raise self.reject("price_per_hour", "a price above 0, as export.optimise is cost")
