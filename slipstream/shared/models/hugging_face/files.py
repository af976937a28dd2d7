"""Trained transformer in Hugging Face's format: ``config.json`` and float32 weights, adapters merged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from slipstream.shared.artifacts.hugging_face import CONFIG
from slipstream.shared.models.adapters.merge import merged_tensors
from slipstream.shared.models.adapters.network import plain_shapes
from slipstream.shared.models.hugging_face.parts import PART_BYTES, Content, weight_files
from slipstream.shared.models.trained import TensorType
from slipstream.shared.models.transformer import Transformer
from slipstream.shared.models.transformer_config import TransformerConfig, to_hugging_face


def transformer_config(model: Transformer) -> TransformerConfig | None:
    """Return the model's configuration.

    None if pruning left layers of different widths, which Hugging Face's format cannot describe.
    """
    widths = {shape[0] for name, shape in plain_shapes(model).items() if name.endswith("gate_proj.weight")}
    return replace(model.config, intermediate_size=widths.pop()) if len(widths) == 1 else None


def hugging_face_files(
    model: Transformer, most: int = PART_BYTES, stops: Sequence[int] = ()
) -> Iterator[tuple[str, Content]]:
    """Yield names and contents of the files that ``AutoModelForCausalLM.from_pretrained`` reads.

    Shards of weights have at most ``most`` bytes. If the model has no document end, generation ends at the tokens
    ``stops``. Yields nothing if :func:`transformer_config` is None.
    """
    config = transformer_config(model)
    if config is None:
        return
    end = model.document_end
    # The token that ends a text also starts the next one.
    ends: dict[str, object] = {"bos_token_id": end, "eos_token_id": end} if end >= 0 else {}
    if end < 0 and stops:
        ends = {"eos_token_id": stops[0] if len(stops) == 1 else list(stops)}
    yield CONFIG, [json.dumps(to_hugging_face(config) | ends, indent=2).encode()]
    kinds = {name: TensorType(torch.float32, shape) for name, shape in plain_shapes(model).items()}
    yield from weight_files(kinds, ((name, tensor.float()) for name, tensor in merged_tensors(model)), most)
