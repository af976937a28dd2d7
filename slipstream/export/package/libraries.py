"""What Hugging Face's libraries load of an exported transformer, whatever else is exported: ``hugging-face/``, and if
it has adapters ``adapter/``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.prepared.token_rows import TOKENIZER
from slipstream.artifacts.results.export import LibraryFiles

if TYPE_CHECKING:
    from torch import nn

    from slipstream.models.config import ModelConfig
    from slipstream.models.transformer import Transformer

HUGGING_FACE, ADAPTER = "hugging-face", "adapter"
WEIGHTS = ".safetensors"


def write_libraries(
    writer: ArtifactWriter, network: nn.Module, config: ModelConfig, data: PreparedData
) -> list[LibraryFiles]:
    """Write the directories, if the trained ``network`` of the configuration is our transformer. Empty if there is
    nothing that those libraries could load."""
    from slipstream.models.transformer import Transformer

    if not isinstance(network, Transformer):
        return []
    adapters = [write_adapter(writer, network, config)] if config.lora.rank else []
    return [*write_hugging_face(writer, network, data), *adapters]


def write_hugging_face(writer: ArtifactWriter, network: Transformer, data: PreparedData) -> list[LibraryFiles]:
    """The whole model, its adapters merged, with the tokenizer if the data has one. Empty if that library has no such
    model."""
    from slipstream.models.hugging_face.files import files_of

    sizes = list[int]()
    for name, content in files_of(network):
        with writer.create(f"{HUGGING_FACE}/{name}") as file:
            written = sum(map(file.write, content))
        if name.endswith(WEIGHTS):
            sizes.append(written)
    if not sizes:
        return []
    for name in data.artifact.files:
        if name.startswith(f"{TOKENIZER}/"):
            writer.write_bytes(name.replace(TOKENIZER, HUGGING_FACE, 1), data.artifact.read_bytes(name))
    return [LibraryFiles(HUGGING_FACE, len(sizes), sum(sizes))]


def write_adapter(writer: ArtifactWriter, network: Transformer, config: ModelConfig) -> LibraryFiles:
    """The adapters alone, as peft has them."""
    from slipstream.models.adapters.layers import is_adapter
    from slipstream.models.adapters.peft_files import Adapter, peft_files

    tensors = {name: tensor for name, tensor in network.state_dict().items() if is_adapter(name)}
    files = peft_files(Adapter(config.lora, config.base, tensors))
    for name, content in files.items():
        writer.write_bytes(f"{ADAPTER}/{name}", content)
    sizes = [len(content) for name, content in files.items() if name.endswith(WEIGHTS)]
    return LibraryFiles(ADAPTER, len(sizes), sum(sizes), config.base, config.lora.rank)
