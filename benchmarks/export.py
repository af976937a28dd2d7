"""Latency of the exported variants beside torch eager and beside what ONNX Runtime's tool makes with its defaults.

Random weights and inputs: what an operator costs does not depend on them. All variants of a model are timed in turns,
in one run, with one thread.

    python benchmarks/export.py [--quick] [--json FILE]

"int8-every-operator" quantises every operator but products of stacked matrices, which ONNX Runtime cannot run with a
scale per channel; below each table stands how many of these there are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.command import benchmark
from harness.table import Column, Table
from harness.turns import Figures
from tasks.artifacts.prepared import Signature, TensorSpec
from tasks.export.convert import EXAMPLE_ROWS, check_parity, quiet, to_onnx
from tasks.export.quantise import quantise, stacked_products
from tasks.export.session import onnx_predictor
from tasks.export.variants import FP32, INT8, TORCH, time_variants
from tasks.hardware.machine import this_machine
from tasks.models.config import ModelConfig
from tasks.models.factory import build
from tasks.models.predict import Predictor, inputs_of, torch_predictor

THREADS = 1
BATCHES = (1, 32, 256)
#: The same tool with its own settings (signed activations, one scale per tensor), and with ours on every operator.
TOOL_DEFAULTS, EVERY_OPERATOR = "int8-defaults", "int8-every-operator"


def image_signature(side: int, channels: int) -> Signature:
    spec = TensorSpec("image", "uint8", (channels, side, side))
    mean, std = (100.0,) * channels, (60.0,) * channels
    return Signature((spec,), "classification", "class", tuple("0123456789"), image_mean=mean, image_std=std)


def table_signature(numeric: int, cardinalities: tuple[int, ...]) -> Signature:
    specs = (TensorSpec("numeric", "float32", (numeric,)), TensorSpec("categorical", "int32", (len(cardinalities),)))
    return Signature(specs, "classification", "class", ("no", "yes"), cardinalities)


MODELS: dict[str, tuple[Signature, dict[str, Any]]] = {
    "mlp": (table_signature(10, (10, 17, 8, 16, 7, 6, 3, 43)), {}),
    "mlp-wide": (table_signature(200, (1000, 100)), {"hidden": [1024, 512, 128]}),
    "resnet-8x8": (image_signature(8, 1), {}),
    "resnet-32x32": (image_signature(32, 3), {"widths": [32, 64, 128]}),
}


def random_records(signature: Signature, rows: int) -> np.ndarray:
    """Records of the signature with standard normal, uniform 8-bit or valid categorical contents."""
    rng = np.random.default_rng(0)
    records = np.zeros(rows, signature.record)
    for spec in signature.inputs:
        size = (rows, *spec.shape)
        if spec.dtype == "uint8":
            records[spec.name] = rng.integers(0, 256, size)
        elif spec.dtype == "int32":
            records[spec.name] = rng.integers(0, signature.cardinalities, size)
        else:
            records[spec.name] = rng.normal(size=size)
    return records


def alternatives(prepared: Path, inputs: Mapping[str, np.ndarray], stacked: list[str]) -> dict[str, Predictor]:
    """The file ``prepared`` quantised in the two ways that we do not use, the second but for the nodes ``stacked``."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Once(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [dict(inputs)]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    settings: dict[str, dict[str, Any]] = {
        TOOL_DEFAULTS: {},
        EVERY_OPERATOR: {
            "activation_type": QuantType.QUInt8,
            "weight_type": QuantType.QInt8,
            "per_channel": True,
            "reduce_range": this_machine().saturates,
            "nodes_to_exclude": stacked,
        },
    }
    with quiet():
        for name, setting in settings.items():
            quantize_static(prepared, prepared.with_name(f"{name}.onnx"), Once(), **setting)
    return {name: onnx_predictor(prepared.with_name(f"{name}.onnx"), THREADS) for name in settings}


def variants_of(name: str, directory: Path, seconds: float, batches: Sequence[int]) -> Table:
    """Every variant of one model: latency per batch size (``seconds`` for all at each) and bytes on disk."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    signature, arguments = MODELS[name]
    records = random_records(signature, max(BATCHES))
    inputs = inputs_of(signature, records)
    model = build(ModelConfig(arguments=arguments), signature, seed=0).eval()
    fp32, int8, prepared = (directory / f"{file}.onnx" for file in (FP32, INT8, "prepared"))
    to_onnx(model, signature, [array[:EXAMPLE_ROWS] for array in inputs], 20, fp32)
    quantise(fp32, int8, inputs, reduce_range=this_machine().saturates)
    with quiet():
        quant_pre_process(fp32, prepared)
    stacked = stacked_products(onnx.load(prepared))
    by_name = dict(zip((spec.name for spec in signature.inputs), inputs, strict=True))
    runs = {
        TORCH: torch_predictor(model),
        FP32: onnx_predictor(fp32, THREADS),
        INT8: onnx_predictor(int8, THREADS),
        **alternatives(prepared, by_name, stacked),
    }
    check_parity(runs[TORCH], runs[FP32], inputs)
    timed = time_variants(runs, signature, records, THREADS, seconds, batches)
    rows: dict[str, Figures] = {}
    for variant, latency in timed.items():
        rows[variant] = {"bytes": (directory / f"{variant}.onnx").stat().st_size} if variant != TORCH else {}
        for batch, at in latency.items():
            figures = {"p50_ms": at["p50"], "p99_ms": at["p99"], "speed": timed[FP32][batch]["p50"] / at["p50"]}
            rows[variant] |= {f"{key}_{batch}": figure for key, figure in figures.items()}
    remark = f"{EVERY_OPERATOR}: but for {len(stacked)} products of stacked matrices"
    return Table(name, columns(batches), rows, (remark,) if stacked else ())


def columns(batches: Sequence[int]) -> tuple[Column, ...]:
    """``speed`` is how many times as fast as ONNX Runtime's FP32."""
    latency = [
        (
            Column(f"batch {batch}: p50 ms", f"p50_ms_{batch}", "{:.4f}"),
            Column("p99 ms", f"p99_ms_{batch}", "{:.4f}"),
            Column("speed", f"speed_{batch}", "{:.2f}x"),
        )
        for batch in batches
    ]
    return (*chain.from_iterable(latency), Column("KB", "bytes", "{:.0f}", 1000))


@benchmark
def main(quick: bool) -> Iterator[Table]:
    """Latency of the variants of each model, timed in turns."""
    names, seconds, batches = (("mlp", "resnet-8x8"), 0.05, BATCHES[:2]) if quick else (tuple(MODELS), 4.0, BATCHES)
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            yield variants_of(name, Path(directory), seconds, batches)


if __name__ == "__main__":
    main()
