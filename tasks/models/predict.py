"""Run a torch or ONNX model over prepared rows, with NumPy arrays as inputs and output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.artifacts.prepared import TARGET, PreparedData, Signature
from tasks.errors import UserError

if TYPE_CHECKING:
    from torch import nn

#: Takes the inputs ``[batch, ...]`` in the order of the signature; returns float32 ``[batch, outputs]``.
Predictor = Callable[[Sequence[np.ndarray]], np.ndarray]
BATCH = 256


def torch_predictor(model: nn.Module) -> Predictor:
    """A ``torch.nn.Module`` in evaluation mode, run eagerly."""
    import torch

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            return model(*(torch.from_numpy(array) for array in inputs)).numpy()

    return run


def inputs_of(signature: Signature, records: np.ndarray) -> tuple[np.ndarray, ...]:
    """The inputs of some prepared records, as contiguous, writable copies."""
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
    """The targets ``[rows]``: int32 classes, or float32 values in units of the target."""
    return np.array(records[TARGET])
