"""Checks before training that the model can be exported to ONNX."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.weights_alone import parameters_without_adapters
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.hugging_face.files import transformer_config
from slipstream.shared.models.transformer import Transformer

#: For every built-in model, the data signature that gives it the fewest parameters. The transformer is missing because
#: it can be exported as Hugging Face files instead.
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


def check_for_any_data(model: ModelConfig, name: str, config: ExportConfig) -> None:
    """Raise ``UserError`` if the built-in model ``name`` exceeds ``most_parameters`` whatever the data."""
    if name in SMALLEST:
        network = build_model(model, SMALLEST[name], seed=0, shapes_alone=True).network
        refuse_too_large(network, name, config.most_parameters, "at least ")


def check_exportable(prepared: Path, model: ModelConfig, most_parameters: int) -> None:
    """Raise ``UserError`` if the model has more than ``most_parameters`` on these data.

    A model that cannot be built on the meta device is not checked, nor a transformer that can be exported as Hugging
    Face files.
    """
    signature = open_prepared(prepared).signature
    try:
        network = build_model(model, signature, seed=0, shapes_alone=True).network
    except UserError:
        return
    if not isinstance(network, Transformer) or transformer_config(network) is None:
        refuse_too_large(network, model.name, most_parameters)


def refuse_too_large(network: nn.Module, name: str, most: int, bound: str = "") -> None:
    count = parameters_without_adapters(network)
    if count > most:
        raise UserError(
            f"export.most_parameters: {most:,} is too small for {name}, which has {bound}{count:,} parameters and can "
            "be exported to ONNX only; raise it (ONNX files hold 2 GiB), or train a smaller model"
        )
