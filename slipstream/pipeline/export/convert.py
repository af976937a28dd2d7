"""Conversion of a torch module to one ONNX file, with checks of its dynamic batch axis and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.errors import UserError
from slipstream.shared.models.predict import ModelFunction

if TYPE_CHECKING:
    import onnx
    from torch import nn

#: Rows of the example input. With one row torch.export fixes the batch size at 1 for some models (pytorch#157621).
EXAMPLE_ROWS = 2
PARITY_BATCHES = (1, 2, 5, 32)
#: Number of rows whose outputs in one batch are compared with those of single-row calls.
MIXED_ROWS = 5
#: Largest difference between ONNX Runtime and torch that rounding explains, relative to the largest output; for a
#: regression to its largest deviation from the target's mean.
TOLERANCE = 1e-4


def output_name(signature: Signature) -> str:
    return "value" if signature.task == "regression" else "logits"


@contextmanager
def exporters_silenced() -> Iterator[None]:
    """Suppress log messages, warnings and printed output of the exporters."""
    import contextlib
    import io
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        nowhere = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def to_onnx(model: nn.Module, signature: Signature, example: Sequence[np.ndarray], opset: int, path: Path) -> None:
    """Export ``model`` to the single file ``path``.

    ``example`` holds :data:`EXAMPLE_ROWS` rows of every input. Raises ``UserError`` if the model cannot be exported, if
    torch wrote another opset than ``opset``, or if the batch axis of an input or output is fixed.
    """
    import onnx
    import torch

    class Positional(torch.nn.Module):
        """Wrapper that passes inputs by position, independent of the model's argument names."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return self.model(*inputs)

    tensors = tuple(torch.from_numpy(array) for array in example)
    batch = torch.export.Dim("batch")
    try:
        with exporters_silenced(), torch.inference_mode():
            program = torch.onnx.export(
                Positional().eval(),
                tensors,
                dynamo=True,
                dynamic_shapes=(tuple({0: batch} for _ in tensors),),
                opset_version=opset,
                input_names=[spec.name for spec in signature.inputs],
                output_names=[output_name(signature)],
                verbose=False,
            )
    except Exception as error:
        raise UserError(f"model.name: torch cannot export this model to ONNX: {reason_of(error)}") from error
    assert program is not None
    exported = with_lists_of_axes(without_provenance(program.model_proto))
    onnx.checker.check_model(exported)
    check_opset(exported, opset)
    check_dynamic_batch(exported)
    onnx.save(exported, path)


def reason_of(error: BaseException) -> str:
    """Return why the exporter failed and what to change, from the root cause of its errors."""
    while error.__cause__:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    if missing := re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text):
        return f"ONNX has no operator for torch's {missing[1]}; replace it with other operations"
    if "data-dependent" in text:
        return f"its forward branches on values of its inputs ({text.splitlines()[0]}); use torch.where"
    return f"{text.splitlines()[0]}; use only operations that torch.export can trace, with any batch size"


def without_provenance(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove torch's metadata: source lines and paths of the exporting machine."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return model


def with_lists_of_axes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace scalar axes of ``Unsqueeze`` by lists of one axis, in place.

    torch 2.13's exporter writes scalars, for example for grouped-query attention. The operator requires a list, so
    ONNX Runtime's shape inference fails.
    """
    graph = model.graph
    numbers = {tensor.name: tensor for tensor in graph.initializer if not tensor.dims}
    unsqueezes = [node for node in graph.node if node.op_type == "Unsqueeze" and node.input[1] in numbers]
    for name in {node.input[1] for node in unsqueezes}:
        listed = graph.initializer.add()
        listed.CopyFrom(numbers[name])
        listed.name = f"{name}_listed"
        listed.dims.append(1)
        for node in unsqueezes:
            if node.input[1] == name:
                node.input[1] = listed.name
        if not any(name in node.input for node in graph.node):
            graph.initializer.remove(numbers[name])
    return model


def model_opset(model: onnx.ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def check_opset(model: onnx.ModelProto, asked: int) -> None:
    if (written := model_opset(model)) != asked:
        raise UserError(
            f"export.opset: {asked} was requested, but torch wrote {written}; set export.opset to {written}"
        )


def check_dynamic_batch(model: onnx.ModelProto) -> None:
    """Raise ``UserError`` unless all inputs and outputs share one symbolic first dimension."""
    leading = {}
    for value in (*model.graph.input, *model.graph.output):
        dimensions = value.type.tensor_type.shape.dim
        leading[value.name] = dimensions[0].dim_param or str(dimensions[0].dim_value) if dimensions else "nothing"
    for name, dimension in leading.items():
        if dimension.isdecimal() or dimension == "nothing" or len(set(leading.values())) > 1:
            raise UserError(
                f"export: {name} of the ONNX model has {dimension} as the first dimension instead of the batch; the "
                "model's forward must not depend on the number of rows"
            )


def check_parity(
    reference: ModelFunction,
    candidate: ModelFunction,
    inputs: Sequence[np.ndarray],
    signature: Signature | None = None,
) -> None:
    """Compare the outputs of two models at each of :data:`PARITY_BATCHES`.

    Batches repeat rows of ``inputs`` if there are too few. Raises ``UserError`` at the first batch size at which
    outputs differ by more than :data:`TOLERANCE` or ``candidate`` does not run.
    """
    for rows in PARITY_BATCHES:
        batch = [np.resize(array, (rows, *array.shape[1:])) for array in inputs]
        expected = reference(batch)
        try:
            outputs = candidate(batch)
        except Exception as error:
            raise UserError(f"export: the ONNX model does not run at batch {rows}: {error}") from error
        if outputs.shape != expected.shape:
            raise UserError(f"export: at batch {rows} ONNX gives {outputs.shape}, torch {expected.shape}")
        allowed = rounding_error(expected, signature, TOLERANCE)
        if not (difference := largest_difference(expected, outputs)) <= allowed:
            raise UserError(
                f"export: at batch {rows} ONNX Runtime and torch differ by {difference:.3g}, more than the "
                f"{allowed:.3g} that rounding explains; try another export.opset"
            )


def check_rows(run: ModelFunction, inputs: Sequence[np.ndarray], signature: Signature | None = None) -> None:
    """Raise ``UserError`` if a row's outputs depend on the other rows of its batch.

    Servers batch unrelated requests.
    """
    rows = min(MIXED_ROWS, len(inputs[0]))
    together = run([array[:rows] for array in inputs])
    alone = np.concatenate([run([array[row : row + 1] for array in inputs]) for row in range(rows)])
    difference = largest_difference(alone, together)
    if not difference <= rounding_error(alone, signature, TOLERANCE):
        raise UserError(
            f"model.name: a row's outputs differ by {difference:.3g} with the other rows of its batch; its forward "
            "must process every row independently"
        )


def rounding_error(outputs: np.ndarray, signature: Signature | None, tolerance: float) -> float:
    """Return the difference of ``outputs`` that rounding explains; it follows a target's spread, not its mean."""
    mean, std = (signature.target_mean, signature.target_std) if signature else (0.0, 1.0)
    largest = np.abs(outputs).max()
    return float(tolerance * np.abs(outputs - mean).max() + 1e-7 * std + 2 * np.spacing(largest))


def largest_difference(expected: np.ndarray, outputs: np.ndarray) -> float:
    """Return the largest absolute difference, in the outputs' units; NaN if an output is NaN."""
    return float(np.abs(expected.astype(np.float64) - outputs.astype(np.float64)).max())
