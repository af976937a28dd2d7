"""The variants of one model: how they are made, scored on the test split, and timed in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.artifacts.exported import LatencyFigures, VariantFigures
from tasks.artifacts.prepared import PreparedData, Signature
from tasks.export.config import ExportConfig
from tasks.export.convert import EXAMPLE_ROWS, check_parity, largest_difference, to_onnx
from tasks.export.gate import significance
from tasks.export.latency import measure, torch_threads
from tasks.export.quantise import quantise
from tasks.export.session import onnx_predictor
from tasks.hardware.machine import Machine
from tasks.models.metrics import scores
from tasks.models.predict import Predictor, inputs_of, predict, targets_of, torch_predictor

if TYPE_CHECKING:
    from torch import nn

TORCH, FP32, INT8 = "torch-fp32", "onnx-fp32", "onnx-int8"
FILES = {FP32: "model.fp32.onnx", INT8: "model.int8.onnx"}
BATCHES = (1, 256)
#: Seconds of timing at each batch size, for all variants together.
TIMING_SECONDS = 1.2


@dataclass(frozen=True)
class Variant:
    """A variant of the model that runs; ``outputs`` are its float32 ``[rows, outputs]`` for the whole test split."""

    name: str
    file: str | None
    bytes: int
    run: Predictor
    outputs: np.ndarray


def torch_variant(model: nn.Module, signature: Signature, test: np.ndarray) -> Variant:
    """The trained module itself, with which the others are compared."""
    run = torch_predictor(model)
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return Variant(TORCH, None, size, run, predict(run, signature, test))


def fp32_variant(
    directory: Path, model: nn.Module, torch: Variant, data: PreparedData, config: ExportConfig
) -> Variant:
    """The exported model. Raises ``UserError`` if its outputs differ from torch's at any of the batch sizes tried."""
    path, test = directory / FILES[FP32], data.split("test")
    to_onnx(model, data.signature, inputs_of(data.signature, np.resize(test, EXAMPLE_ROWS)), config.opset, path)
    run = onnx_predictor(path, config.threads)
    check_parity(torch.run, run, inputs_of(data.signature, test[:32]))
    return Variant(FP32, path.name, path.stat().st_size, run, predict(run, data.signature, test))


def int8_variant(directory: Path, data: PreparedData, config: ExportConfig, machine: Machine) -> Variant:
    """The quantised model, calibrated on rows of the training split. Raises any error of quantisation or inference."""
    fp32, int8 = directory / FILES[FP32], directory / FILES[INT8]
    inputs = inputs_of(data.signature, data.sample("train", config.calibration_rows))
    try:
        quantise(fp32, int8, inputs, reduce_range=machine.saturates)
        run = onnx_predictor(int8, config.threads)
        return Variant(INT8, int8.name, int8.stat().st_size, run, predict(run, data.signature, data.split("test")))
    except Exception:
        int8.unlink(missing_ok=True)
        raise


def time_variants(
    runs: Mapping[str, Predictor],
    signature: Signature,
    records: np.ndarray,
    threads: int,
    seconds: float,
    batches: Sequence[int] = BATCHES,
) -> dict[str, dict[str, LatencyFigures]]:
    """Time the variants in turns with ``threads`` threads each, for about ``seconds`` at each batch size.

    Returns the latencies by variant and batch size. ``records`` are repeated if there are fewer than a batch.
    """
    timed: dict[str, dict[str, LatencyFigures]] = {name: {} for name in runs}
    with torch_threads(threads):
        for rows in batches:
            inputs = inputs_of(signature, np.resize(records, rows))
            calls = {name: (lambda run=run, inputs=inputs: run(inputs)) for name, run in runs.items()}
            for name, latency in measure(calls, seconds).items():
                timed[name][str(rows)] = {"p50": latency.p50, "p99": latency.p99, "calls": latency.calls}
    return timed


def figures(
    variant: Variant, torch: Variant, fp32: Variant, task: str, test: np.ndarray, latency_ms: dict[str, LatencyFigures]
) -> VariantFigures:
    """The entry of a variant in ``export.json``; the gate's decision is still missing."""
    truth = targets_of(test)
    found: VariantFigures = {
        "name": variant.name,
        "file": variant.file,
        "bytes": variant.bytes,
        "chosen": False,
        "verdict": "",
        "latency_ms": latency_ms,
        "rows_per_second": {rows: int(rows) / at["p50"] * 1000 for rows, at in latency_ms.items()},
        "metrics": scores(task, variant.outputs, truth),
        "largest_difference": largest_difference(torch.outputs, variant.outputs),
    }
    if variant.name not in (TORCH, FP32):
        found["paired"] = significance(task, truth, fp32.outputs, variant.outputs)
    return found
