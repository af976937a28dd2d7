"""What Hugging Face's libraries load of an exported transformer: ``hugging-face/``, whatever else is exported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.prepared.token_rows import TOKENIZER
from slipstream.artifacts.results.export import LibraryFiles

if TYPE_CHECKING:
    from torch import nn

HUGGING_FACE = "hugging-face"
WEIGHTS = ".safetensors"


def write_libraries(writer: ArtifactWriter, model: nn.Module, data: PreparedData) -> list[LibraryFiles]:
    """Write the directory if ``model`` is a predictor of our transformer, with the tokenizer if the data has one. Empty
    if there is nothing that those libraries could load."""
    from slipstream.models.hugging_face.files import files_of
    from slipstream.models.transformer import Transformer

    network = getattr(model, "network", None)
    if not isinstance(network, Transformer):
        return []
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
