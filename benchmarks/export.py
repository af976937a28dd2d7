"""Latency of the exported variants beside torch eager and beside what ONNX Runtime's tool makes with its defaults.

Random weights and inputs: what an operator costs does not depend on them. All variants of a model are timed in turns,
in one run, with one thread. ``python benchmarks/export.py [--quick] [--json FILE]``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from tasks.artifacts.prepared import Signature, TensorSpec
from tasks.export.convert import EXAMPLE_ROWS, check_parity, quiet, to_onnx
from tasks.export.engine import describe
from tasks.export.machine import this_machine
from tasks.export.quantise import quantise
from tasks.export.session import onnx_predictor
from tasks.export.variants import FP32, INT8, TORCH, time_variants
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


def alternatives(directory: Path, names: Sequence[str], inputs: Sequence[np.ndarray]) -> dict[str, Predictor]:
    """The FP32 file quantised in the two ways that we do not use."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Once(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [dict(zip(names, inputs, strict=True))]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    settings: dict[str, dict[str, Any]] = {
        TOOL_DEFAULTS: {},
        EVERY_OPERATOR: {
            "activation_type": QuantType.QUInt8,
            "weight_type": QuantType.QInt8,
            "per_channel": True,
            "reduce_range": this_machine().saturates,
        },
    }
    with quiet():
        quant_pre_process(directory / "fp32.onnx", directory / "prepared.onnx")
        for name, setting in settings.items():
            quantize_static(directory / "prepared.onnx", directory / f"{name}.onnx", Once(), **setting)
    return {name: onnx_predictor(directory / f"{name}.onnx", THREADS) for name in settings}


def bench(name: str, directory: Path, seconds: float) -> dict[str, Any]:
    """Every variant of one model: latency per batch size (``seconds`` for all at each) and bytes on disk."""
    signature, arguments = MODELS[name]
    records = random_records(signature, max(BATCHES))
    inputs = inputs_of(signature, records)
    model = build(ModelConfig(arguments=arguments), signature, seed=0).eval()
    to_onnx(model, signature, [array[:EXAMPLE_ROWS] for array in inputs], 20, directory / "fp32.onnx")
    quantise(directory / "fp32.onnx", directory / "int8.onnx", inputs, reduce_range=this_machine().saturates)
    runs = {
        TORCH: torch_predictor(model),
        FP32: onnx_predictor(directory / "fp32.onnx", THREADS),
        INT8: onnx_predictor(directory / "int8.onnx", THREADS),
        **alternatives(directory, [spec.name for spec in signature.inputs], inputs),
    }
    check_parity(runs[TORCH], runs[FP32], inputs)
    timed = time_variants(runs, signature, records, THREADS, seconds, BATCHES)
    files = {FP32: "fp32", INT8: "int8", TOOL_DEFAULTS: TOOL_DEFAULTS, EVERY_OPERATOR: EVERY_OPERATOR}
    sizes = {variant: (directory / f"{file}.onnx").stat().st_size for variant, file in files.items()}
    return {variant: {"bytes": sizes.get(variant), "latency_ms": latency} for variant, latency in timed.items()}


def show(name: str, found: dict[str, Any]) -> None:
    """One line per variant: p50 and p99 in ms, in brackets how many times as fast as ONNX Runtime's FP32."""
    print(f"\n{name:<20} " + " ".join(f"{f'batch {b}: p50 / p99 ms':>34}" for b in BATCHES) + f"{'KB':>10}")
    for variant, figures in found.items():
        cells = []
        for batch in map(str, BATCHES):
            at, reference = figures["latency_ms"][batch], found[FP32]["latency_ms"][batch]["p50"]
            cells.append(f"{at['p50']:>10.4f} / {at['p99']:>9.4f} ({reference / at['p50']:>5.2f} x)")
        size = f"{figures['bytes'] / 1000:>10.0f}" if figures["bytes"] else f"{'':>10}"
        print(f"{variant:<20} " + " ".join(f"{cell:>34}" for cell in cells) + size)


@click.command()
@click.option("--quick", is_flag=True, help="0.5 s instead of 4 s for each model and batch size, and no large models.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(quick: bool, target: Path | None) -> None:
    """Time the variants of each model side by side."""
    machine = describe(this_machine(), THREADS)
    print(f"{machine['cpu']} ({', '.join(machine['flags'])}), {THREADS} thread, ONNX Runtime {machine['onnxruntime']}")
    results = {}
    for name in ("mlp", "resnet-8x8") if quick else MODELS:
        with tempfile.TemporaryDirectory() as directory:
            results[name] = bench(name, Path(directory), 0.5 if quick else 4.0)
        show(name, results[name])
    if target:
        target.write_text(json.dumps({"machine": machine, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
