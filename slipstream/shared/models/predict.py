"""Prediction over prepared rows with any model function, with NumPy inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature
from slipstream.shared.artifacts.prepared.token_rows import read_tokens
from slipstream.shared.errors import UserError
from slipstream.shared.models.decision import with_threshold

if TYPE_CHECKING:
    from torch import nn

    from slipstream.shared.models.trained import TrainedModel

#: Function of the inputs ``[batch, ...]`` in the signature's order that returns ``[batch, *output_shape]``, of the
#: signature's output dtype.
ModelFunction = Callable[[Sequence[np.ndarray]], np.ndarray]
BATCH = 256
#: Maximum number of token logits in a batch.
MOST_LOGITS = 2**24


def model_function(model: nn.Module) -> ModelFunction:
    """Wrap a ``torch.nn.Module`` in evaluation mode as a model function."""
    import torch

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            return model(*(torch.from_numpy(array) for array in inputs)).numpy()

    return run


def record_inputs(signature: Signature, records: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the model's inputs from prepared records, as contiguous, writable copies."""
    if signature.task == "next token":
        return tuple(read_tokens(records[spec.name])[0].astype(spec.dtype) for spec in signature.inputs)
    return tuple(np.array(records[spec.name], dtype=spec.dtype, order="C") for spec in signature.inputs)


def predict_records(run: ModelFunction, signature: Signature, records: np.ndarray, most: int = BATCH) -> np.ndarray:
    """Return the outputs for all ``records``, ``[rows, outputs]``, in calls of at most ``most`` rows.

    For rows of tokens, whose logits take too much memory, return ``[rows, length, 2]`` from :func:`grade_tokens`.
    Raises ``UserError`` if an output is not finite or has another shape than the signature's.
    """
    tokens = signature.task == "next token"
    step = max(1, min(most, MOST_LOGITS // math.prod(signature.output_shape))) if tokens else most
    parts = []
    for start in range(0, len(records), step):
        batch = records[start : start + step]
        part, expected = run(record_inputs(signature, batch)), (len(batch), *signature.output_shape)
        if part.shape != expected:
            raise UserError(f"model: its outputs have the shape {part.shape}; expected {expected}, as in the data")
        parts.append(grade_tokens(part, record_targets(batch)) if tokens else part)
    outputs = np.concatenate(parts)
    if bad := int(np.sum(~np.isfinite(outputs).all(axis=tuple(range(1, outputs.ndim))))):
        raise UserError(
            f"model: {bad} of {len(records)} rows get NaN or infinity instead of a finite number; "
            "try a lower training.learning_rate"
        )
    return outputs


def decided_outputs(model: TrainedModel, records: np.ndarray) -> np.ndarray:
    """Return the outputs of a trained model, whose largest decide by its threshold, if it has one."""
    outputs = predict_records(model_function(model.load()), model.signature, records)
    return with_threshold(outputs, model.threshold)


def grade_tokens(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return hit (1 or 0) and log-probability of every true token, float32 ``[rows, length, 2]``.

    ``logits`` are ``[rows, length, tokens]``, ``truth`` is ``[rows, length]``. A hit means that the true token is the
    most likely. Both numbers are 0 for tokens that are not learned.
    """
    learned, ids = truth >= 0, np.maximum(truth, 0)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    of_truth = np.take_along_axis(shifted, ids[..., None].astype(np.int64), axis=-1)[..., 0]
    likelihood = of_truth - np.log(np.exp(shifted).sum(axis=-1))
    graded = np.stack([logits.argmax(axis=-1) == truth, likelihood], axis=-1).astype(np.float32)
    return graded if learned.all() else graded * learned[..., None].astype(np.float32)


def held_out_rows(data: PreparedData) -> np.ndarray:
    """Return the test split's records; raises ``UserError`` if there are none."""
    records = data.split("test")
    if not len(records):
        raise UserError("data.split.test: the test split has no rows to measure with; raise it, or give more data")
    return records


def record_targets(records: np.ndarray) -> np.ndarray:
    """Return the targets ``[rows]``, int32 classes or floats; the labels of tokens are ``[rows, length]``."""
    stored = np.array(records[TARGET])
    return read_tokens(stored)[1] if stored.ndim == 2 else stored
