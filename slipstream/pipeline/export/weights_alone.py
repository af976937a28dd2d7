"""Export of a model that is too large for ONNX, as Hugging Face files with a model card.

The model is neither run nor measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from slipstream.pipeline.export.card import model_card
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.package.assemble import LOGITS, finish_package, holdout_rule
from slipstream.pipeline.export.package.libraries import HUGGING_FACE
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.results.export import (
    MODEL_CARD,
    PREPROCESSING,
    REPORT,
    SIGNATURE,
    DeployedSignature,
    DeployedTensor,
    ExportReport,
    LibraryFiles,
    MachineFigures,
)
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.hugging_face.files import transformer_config
from slipstream.shared.models.transformer import Transformer

if TYPE_CHECKING:
    pass


def too_large(model: nn.Module, config: ExportConfig) -> str:
    """Return why the model gets no ONNX variants; "" if it gets them.

    Parameters of adapters do not count.
    """
    count, most = parameters_without_adapters(model), config.most_parameters
    return f"{count:,} parameters are more than export.most_parameters, {most:,}" if count > most else ""


def parameters_without_adapters(model: nn.Module) -> int:
    from slipstream.shared.models.adapters.network import plain_shapes

    return sum(map(math.prod, plain_shapes(model).values()))


def export_weights(  # noqa: PLR0913 - all that the artifact holds
    writer: ArtifactWriter,
    libraries: Sequence[LibraryFiles],
    data: PreparedData,
    config: ExportConfig,
    made_by: Mapping[str, object],
    machine: MachineFigures,
    why: str,
    code: Sequence[str],
    trained_by: Mapping[str, object],
) -> Artifact:
    """Write the artifact of a model without ONNX variants; ``why`` is the reason.

    ``code`` are the code versions and ``trained_by`` the
    provenance of the trained model. Raises ``UserError`` if ``libraries`` lack Hugging Face
    files.
    """
    if not any(each.name == HUGGING_FACE for each in libraries):
        raise UserError(
            f"export.most_parameters: the model can be exported as ONNX only, but {why}; raise it (ONNX's files hold "
            "2 GiB), or train a smaller model"
        )
    report = ExportReport(
        task=data.signature.task,
        variants=[],
        chosen="",
        why=why,
        decided_at_batch=config.decide_at_batch,
        best={},
        max_loss=config.max_loss,
        weight_bits=8 if config.target == "vnni" else 7,
        profile=[],
        machine=machine,
        licence=config.licence,
        libraries=list(libraries),
    )
    deployed = as_called(data, why)
    write_record(writer, REPORT, report)
    write_record(writer, SIGNATURE, deployed)
    for name in deployed.preprocessing:
        writer.write_bytes(name, data.artifact.read_bytes(name))
    writer.write_bytes(MODEL_CARD, model_card(deployed, report, data.card, code, trained_by).encode())
    return finish_package(writer, made_by)


def as_called(data: PreparedData, why: str) -> DeployedSignature:
    """Return the transformer's signature, with Hugging Face's names of inputs and outputs."""
    signature = data.signature
    length, vocabulary = signature.output_shape
    return DeployedSignature(
        format=1,
        task=signature.task,
        target=signature.target,
        model="",
        opset=0,
        dynamic_batch=True,
        inputs=[DeployedTensor("input_ids", "int64", ("batch", length), "ids of the tokenizer")],
        outputs=[DeployedTensor("logits", "float32", ("batch", length, vocabulary), LOGITS)],
        classes=[],
        cardinalities=[],
        preprocessing=[name for name in PREPROCESSING if name in data.artifact.files],
        samples=None,
        raw=None,
        no_raw="its inputs are tokens",
        holdout=holdout_rule(data),
        no_onnx=why,
    )


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
