"""Early check that a built-in model can be exported to ONNX, from its settings alone."""

from __future__ import annotations

from slipstream.artifacts.prepared.data import Signature, TensorSpec
from slipstream.errors import UserError
from slipstream.export.config import ExportConfig
from slipstream.export.weights_alone import parameters_of
from slipstream.models.config import ModelConfig
from slipstream.models.factory import build

#: Data signatures with the fewest model parameters: one column for a regression, and small grey images of two classes.
#: The transformer is missing because it can be exported as Hugging Face files instead.
SMALLEST = {
    "mlp": Signature((TensorSpec("numeric", "float32", (1,)),), "regression", "y"),
    "resnet": Signature(
        (TensorSpec("image", "uint8", (1, 32, 32)),),
        "classification",
        "y",
        classes=("a", "b"),
        image_mean=(0.0,),
        image_std=(1.0,),
    ),
}


def refuse_too_large(model: ModelConfig, name: str, config: ExportConfig) -> None:
    """Raise ``UserError`` if the model ``name`` has more than ``most_parameters`` on any data."""
    if name not in SMALLEST:
        return
    count = parameters_of(build(model, SMALLEST[name], seed=0, shapes_alone=True).network)
    if count > config.most_parameters:
        raise UserError(
            f"export.most_parameters: {config.most_parameters:,} are too few for {name}, which has at least {count:,} "
            "and can leave as ONNX only; raise it (ONNX's files hold 2 GiB), or train a smaller model"
        )
