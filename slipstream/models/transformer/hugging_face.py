"""A trained transformer as Hugging Face's libraries read it: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from safetensors.torch import save

from slipstream.models.transformer.config import to_hugging_face
from slipstream.models.transformer.network import Transformer


def files_of(network: Transformer) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the files that ``AutoModelForCausalLM.from_pretrained`` reads. None for a network of
    which some layers lost more units than others, as that library has one size for all."""
    widths = {len(weight) for name, weight in network.state_dict().items() if name.endswith("gate_proj.weight")}
    if len(widths) > 1:
        return
    config = replace(network.config, intermediate_size=widths.pop())
    yield "config.json", json.dumps(to_hugging_face(config), indent=2).encode()
    yield "model.safetensors", save(network.state_dict(), metadata={"format": "pt"})
