"""Transformer files for Hugging Face's libraries: ``hugging-face/`` and, with adapters, ``adapter/``.

They are written for every transformer, with or without ONNX variants.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto

from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.token_rows import (
    FAST,
    TOKENIZER,
    disable_padding_and_truncation,
    parse_tokenizer_json,
)
from slipstream.shared.artifacts.results.export import DeployedTensor, LibraryFiles, ModelSignature
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.errors import UserError
from slipstream.shared.language.chat_template import stop_token_ids
from slipstream.shared.language.tokenizer import READ, SETTINGS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slipstream.shared.models.config import ModelConfig
    from slipstream.shared.models.hugging_face.files import BaseSettings
    from slipstream.shared.models.trained import TrainedModel
    from slipstream.shared.models.transformer import Transformer

HUGGING_FACE, ADAPTER = "hugging-face", "adapter"
WEIGHTS = ".safetensors"


def write_libraries(
    writer: ArtifactWriter, network: nn.Module, trained: TrainedModel, data: PreparedData, dtype: torch.dtype
) -> list[LibraryFiles]:
    """Write the directories if ``network``, that of ``trained``, is Slipstream's transformer, and describe them.

    ``dtype`` is that of ``hugging-face/``. The list is empty if Hugging Face's libraries could load neither.
    """
    from slipstream.shared.models.transformer import Transformer

    if not isinstance(network, Transformer):
        return []
    config = trained.config
    adapters = [write_adapter(writer, network, config)] if config.lora.rank else []
    return [*write_hugging_face(writer, network, data, trained.inherited, dtype), *adapters]


def write_hugging_face(
    writer: ArtifactWriter, network: Transformer, data: PreparedData, base: BaseSettings, dtype: torch.dtype
) -> list[LibraryFiles]:
    """Write merged weights, the settings of the ``base`` and the data's tokenizer.

    Returns an empty list if transformers has no such architecture.
    """
    from slipstream.shared.models.hugging_face.files import hugging_face_files

    sizes = list[int]()
    tokenizer = tokenizer_of(data)
    texts = {name: tokenizer[name].decode() for name in READ if name in tokenizer}
    stops = stop_token_ids(texts, answers=data.signature.conversations)
    for name, content in hugging_face_files(network, stops=stops, base=base, dtype=dtype):
        with writer.create(f"{HUGGING_FACE}/{name}") as file:
            written = sum(map(file.write, content))
        if name.endswith(WEIGHTS):
            sizes.append(written)
    if not sizes:
        return []
    for name, stored in tokenizer.items():
        writer.write_bytes(f"{HUGGING_FACE}/{name}", plain_settings(stored) if name == SETTINGS else stored)
    return [LibraryFiles(HUGGING_FACE, len(sizes), sum(sizes))]


def plain_settings(stored: bytes) -> bytes:
    """Return a ``tokenizer_config.json`` without entries that name code or a place."""
    from slipstream.shared.models.hugging_face.files import without_code

    content = parse_tokenizer_json(stored.decode())
    kept = without_code(content)
    return stored if kept == content else json.dumps(kept, indent=2, ensure_ascii=False).encode()


def tokenizer_of(data: PreparedData) -> dict[str, bytes]:
    """Return the data's tokenizer files by name, without stored truncation, padding and dropout.

    Raises ``UserError`` for a ``tokenizer.json`` that is not a JSON object.
    """
    prefix = f"{TOKENIZER}/"
    files = {
        name.removeprefix(prefix): data.artifact.read_bytes(name)
        for name in data.artifact.files
        if name.startswith(prefix)
    }
    if FAST in files:
        try:
            files[FAST] = disable_padding_and_truncation(files[FAST].decode()).encode()
        except ValueError as error:
            raise UserError(f"data: {prefix}{FAST} is not a tokenizer of Hugging Face's tokenizers: {error}") from None
    return files


def write_adapter(writer: ArtifactWriter, network: Transformer, config: ModelConfig) -> LibraryFiles:
    """Write the LoRA adapters in peft's format."""
    from slipstream.shared.models.adapters.layers import is_adapter
    from slipstream.shared.models.adapters.peft_files import NewAdapter, peft_files

    tensors = {name: tensor for name, tensor in network.state_dict().items() if is_adapter(name)}
    files = peft_files(NewAdapter(config.lora, config.base, tensors))
    for name, content in files.items():
        writer.write_bytes(f"{ADAPTER}/{name}", content)
    sizes = [len(content) for name, content in files.items() if name.endswith(WEIGHTS)]
    return LibraryFiles(ADAPTER, len(sizes), sum(sizes), config.base, config.lora.rank, config.quantise == "nf4")


PREFIX = "slipstream."
#: Parts of the names of low-precision operators, whose results depend on how a processor rounds.
COARSE = ("Quantize", "Integer", "NBits")
COARSE_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def with_metadata(model: onnx.ModelProto, entries: Mapping[str, str]) -> onnx.ModelProto:
    """Add ``entries`` to the model's metadata, with the prefix ``slipstream.``."""
    model.producer_name = "slipstream"
    onnx.helper.set_model_props(model, {PREFIX + name: text for name, text in entries.items()})
    return model


@dataclass(frozen=True)
class ModelProvenance:
    """Provenance of a model: the fingerprints in ``made_by``, its licence and target CPUs."""

    made_by: Mapping[str, object]
    licence: str
    cpu_target: str


def metadata_entries(
    deployed: ModelSignature, inputs: list[DeployedTensor], outputs: list[DeployedTensor], origin: ModelProvenance
) -> dict[str, str]:
    """Return the metadata: names, types and units of ``inputs`` and ``outputs``, classes and origin.

    Unknown entries are omitted.
    """
    texts = {
        "task": deployed.task,
        "target": deployed.target,
        "inputs": json.dumps([described(each) for each in inputs], ensure_ascii=False),
        "outputs": json.dumps([described(each) for each in outputs], ensure_ascii=False),
        "classes": json.dumps(deployed.classes, ensure_ascii=False),
        **{name: str(origin.made_by.get(name, "")) for name in ("prepared", "trained", "code")},
        "commit": git_commit(),
        "cpu_target": origin.cpu_target,
        "licence": origin.licence,
    }
    return {name: text for name, text in texts.items() if text}


def described(tensor: DeployedTensor) -> dict[str, object]:
    return {name: value for name, value in vars(tensor).items() if value is not None}


def git_commit() -> str:
    """Return the commit of this code's working tree, with ``-dirty`` if files differ; "" if git fails."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        return subprocess.run(git, capture_output=True, encoding="utf-8", timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def is_coarse(model: onnx.ModelProto) -> bool:
    """Return True if other processors' rounding may change outputs beyond single precision."""
    graph = model.graph
    return any(part in node.op_type for node in graph.node for part in COARSE) or any(
        tensor.data_type in COARSE_TYPES for tensor in graph.initializer
    )
