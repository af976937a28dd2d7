"""Variants to time and score: torch itself, FP32, and the search's finalists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.pipeline.export.choose import GateResult
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import EXAMPLE_ROWS, check_parity, check_rows, largest_difference, to_onnx
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.export import LatencyFigures, VariantFigures
from slipstream.shared.comparison.latencies import Load
from slipstream.shared.machine.description import ClusterMachine
from slipstream.shared.models.metrics import compute_scores
from slipstream.shared.models.predict import (
    ModelFunction,
    model_function,
    predict_records,
    record_inputs,
    record_targets,
)

if TYPE_CHECKING:
    from torch import nn

TORCH, TORCH_BF16, FP32 = "torch-fp32", "torch-bf16", "onnx-fp32"
FP32_FILE = "model.fp32.onnx"
#: x86 extensions for bfloat16 matmuls.
BF16 = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Variant:
    """Runnable variant of the model; ``outputs`` are float32 ``[rows, outputs]`` on the test split."""

    name: str
    file: str | None
    bytes: int
    load: Load
    outputs: np.ndarray
    #: Code of the quantisation recipe.
    recipe: str = ""


def torch_variants(model: nn.Module, signature: Signature, test: np.ndarray, machine: ClusterMachine) -> list[Variant]:
    """Return the torch module (the reference) and, if the CPU supports it, its bfloat16 form."""
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    runs = {TORCH: model_function(model)}
    if set(BF16) & set(machine.flags):
        runs[TORCH_BF16] = in_bf16(model)
    return [
        Variant(name, None, size, already_loaded(run), predict_records(run, signature, test))
        for name, run in runs.items()
    ]


def already_loaded(run: ModelFunction) -> Load:
    return lambda: run


def in_bf16(model: nn.Module) -> ModelFunction:
    """Return the module with bfloat16 matmuls and convolutions, and float32 outputs."""
    import torch

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return model(*(torch.from_numpy(array) for array in inputs)).float().numpy()

    return run


def fp32_variant(
    directory: Path,
    model: nn.Module,
    reference: ModelFunction,
    data: PreparedData,
    test: np.ndarray,
    config: ExportConfig,
) -> Variant:
    """Return the model converted to ONNX in FP32.

    Raises ``UserError`` if its outputs differ from torch's at a tried batch size.
    """
    path = directory / FP32_FILE
    to_onnx(model, data.signature, record_inputs(data.signature, np.resize(test, EXAMPLE_ROWS)), config.opset, path)
    run, inputs = onnx_predictor(path, config.threads, config.provider), record_inputs(data.signature, test[:32])
    check_parity(reference, run, inputs)
    check_rows(run, inputs)
    return onnx_variant(FP32, path, data.signature, test, config)


def onnx_variant(
    name: str, path: Path, signature: Signature, test: np.ndarray, config: ExportConfig, recipe: str = ""
) -> Variant:
    load = partial(onnx_predictor, path, config.threads, config.provider)
    return Variant(name, path.name, path.stat().st_size, load, predict_records(load(), signature, test), recipe)


def variant_figures(
    variant: Variant,
    reference: Variant,
    task: str,
    test: np.ndarray,
    latency_ms: dict[str, LatencyFigures],
    config: ExportConfig,
) -> VariantFigures:
    """Return a variant's entry in ``export.json``, without its gate result."""
    medians = {rows: at.p50.value for rows, at in latency_ms.items() if at.p50}
    rates = {rows: 1000 * int(rows) / median for rows, median in medians.items()}
    difference = np.abs(variant.outputs.astype(np.float64) - reference.outputs)
    price = config.price_per_hour
    return VariantFigures(
        name=variant.name,
        file=variant.file,
        bytes=variant.bytes,
        chosen=False,
        verdict="",
        reason="",
        recipe=variant.recipe,
        latency_ms=latency_ms,
        rows_per_second=rates,
        cost_per_million={rows: price / 3600 / rate * 1e6 for rows, rate in rates.items()} if price else {},
        metrics=compute_scores(task, variant.outputs, record_targets(test)),
        largest_difference=largest_difference(reference.outputs, variant.outputs),
        mean_difference=float(difference.mean()),
    )


def left_out(name: str, verdict: GateResult, file: Path | None = None, recipe: str = "") -> VariantFigures:
    """Return the report entry of a variant that was not timed; ``file`` is the name of its file if that is kept."""
    size = file.stat().st_size if file else None
    return VariantFigures(name, file.name if file else None, size, False, verdict.short, verdict.reason, recipe)
