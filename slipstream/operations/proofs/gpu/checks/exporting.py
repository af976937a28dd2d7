"""ONNX Runtime on the device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import onnxruntime

from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import EXAMPLE_ROWS, check_parity, largest_difference, to_onnx
from slipstream.pipeline.export.session import PROVIDERS, onnx_predictor
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.predict import model_function, record_inputs

ROWS = 256


def parity(context: CheckContext) -> Sequence[CheckFigure]:
    """Compare FP32 results, without TF32, with torch on the CPU, up to rounding."""
    provider = context.device.type
    if PROVIDERS[provider] not in onnxruntime.get_available_providers():
        raise CannotRun("ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu in place of onnxruntime")
    if find_spec("onnxscript") is None:
        raise CannotRun("torch's exporter needs onnxscript: pip install onnxscript")
    data = write_table(context.directory / "table", "classification")
    model, rows = build_model(ModelConfig("mlp"), data.signature, seed=0).eval(), data.split("test")[:ROWS]
    inputs, path = record_inputs(data.signature, rows), context.directory / "model.onnx"
    to_onnx(model, data.signature, [x[:EXAMPLE_ROWS] for x in inputs], ExportConfig().opset, path)
    on_device, reference = onnx_predictor(path, 1, provider), model_function(model)
    check_parity(reference, on_device, inputs)
    difference = largest_difference(reference(inputs), on_device(inputs))
    return [
        CheckFigure("outputs differ by", difference, "of the largest"),
        CheckFigure("rows", float(len(np.atleast_1d(rows)))),
    ]
