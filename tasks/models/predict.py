"""Running any model, torch or ONNX, over prepared rows: NumPy arrays in, one NumPy array out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tasks.artifacts.prepared import TARGET, PreparedData, Signature
from tasks.errors import UserError

#: Takes the inputs in the order of the signature, ``[batch, ...]`` each, and gives ``[batch, outputs]`` of float32.
Predictor = Callable[[Sequence[np.ndarray]], np.ndarray]
BATCH = 256


def torch_predictor(model: Any) -> Predictor:
    """A ``torch.nn.Module`` in evaluation mode, run eagerly."""
    import torch

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            return model(*(torch.from_numpy(array) for array in inputs)).numpy()

    return run


def inputs_of(signature: Signature, records: np.ndarray) -> tuple[np.ndarray, ...]:
    """The model's inputs of some prepared records: contiguous, writable copies."""
    return tuple(np.array(records[spec.name], dtype=spec.dtype, order="C") for spec in signature.inputs)


def predict(run: Predictor, signature: Signature, records: np.ndarray) -> np.ndarray:
    """The outputs for all ``records``, float32 ``[rows, outputs]``.

    Raises ``UserError`` if an output is not finite or not of the signature's shape.
    """
    batches = (records[start : start + BATCH] for start in range(0, len(records), BATCH))
    outputs = np.concatenate([run(inputs_of(signature, batch)) for batch in batches])
    if outputs.shape != (len(records), signature.outputs):
        expected = (len(records), signature.outputs)
        raise UserError(f"model: its outputs have the shape {outputs.shape}; expected {expected}, as the data has it")
    if bad := int(np.sum(~np.isfinite(outputs).all(axis=1))):
        raise UserError(
            f"model: {bad} of {len(records)} rows get NaN or infinity instead of a finite number; "
            "try a lower training.learning_rate"
        )
    return outputs


def held_out_rows(data: PreparedData) -> np.ndarray:
    """The test split's records. Raises ``UserError`` if there are none to measure with."""
    records = data.split("test")
    if not len(records):
        raise UserError("data.split.test: the test split has no rows to measure with; raise it, or give more data")
    return records


def targets_of(records: np.ndarray) -> np.ndarray:
    """The truth, ``[rows]``: int32 classes or float32 values in units of the target."""
    return np.array(records[TARGET])
