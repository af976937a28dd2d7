"""Which layers lose most by quantisation, so that they can stay in FP32."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from slipstream.export.quantize.quantise import Quantiser
from slipstream.export.quantize.recipes import CONVOLUTIONS, Recipe
from slipstream.export.session import onnx_predictor


def products_of(path: Path) -> list[str]:
    """The names of a file's convolutions and matrix products with a weight."""
    import onnx

    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in CONVOLUTIONS and weights & set(node.input)]


def rank_by_error(quantiser: Quantiser, recipe: Recipe, deadline: float) -> dict[str, float]:
    """The mean absolute error of the outputs if one layer alone is quantised, by its name, the largest first.

    On the calibration rows. Layers that there was no time for (``deadline`` on ``time.perf_counter``) are not there.
    """
    expected = onnx_predictor(quantiser.fp32, 1)(quantiser.inputs)
    target, errors = quantiser.scratch / "single.onnx", dict[str, float]()
    for name in products_of(quantiser.prepared(recipe.smooth)):
        if time.perf_counter() > deadline:
            break
        quantiser.make(recipe, target, only=[name])
        errors[name] = float(np.abs(onnx_predictor(target, 1)(quantiser.inputs) - expected).mean())
    return dict(sorted(errors.items(), key=lambda found: -found[1]))
