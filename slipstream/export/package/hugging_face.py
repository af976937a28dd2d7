"""A transformer's package holds a directory that Hugging Face's libraries load: configuration, weights, tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.prepared.token_rows import TOKENIZER

if TYPE_CHECKING:
    from torch import nn

DIRECTORY = "hugging-face"


def write_hugging_face(writer: ArtifactWriter, model: nn.Module, data: PreparedData) -> None:
    """Write the directory if ``model`` is a predictor of our transformer, with the tokenizer if the data has one."""
    from slipstream.models.hugging_face import files_of
    from slipstream.models.transformer import Transformer

    network = getattr(model, "network", None)
    if not isinstance(network, Transformer):
        return
    for name, content in files_of(network):
        writer.write_bytes(f"{DIRECTORY}/{name}", content)
    for name in data.artifact.files:
        if name.startswith(f"{TOKENIZER}/"):
            writer.write_bytes(name.replace(TOKENIZER, DIRECTORY, 1), data.artifact.read_bytes(name))
