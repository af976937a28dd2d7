"""Trained transformer in Hugging Face's format: ``config.json`` and float32 weights, adapters merged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.shared.artifacts.prepared.token_rows import CONFIG, INDEX, WHOLE
from slipstream.shared.models.adapters.network import merged_tensors, plain_shapes
from slipstream.shared.models.trained import TensorType, raw_bytes, safetensors_header
from slipstream.shared.models.transformer import Transformer
from slipstream.shared.models.transformer_config import TransformerConfig, to_hugging_face

# The index maps tensor names to files. Memory beyond the model is one tensor at a time.
#: Maximum bytes of the tensors in a shard, unless a single tensor has more.
PART_BYTES = 5_000_000_000
#: Metadata that Hugging Face's libraries expect in a header ("pt" for PyTorch).
METADATA = {"format": "pt"}

#: Content of a file in chunks, which must be consumed before the next file is requested.
Content = Iterable[bytes | memoryview]


def divide_into_shards(kinds: Mapping[str, TensorType], most: int) -> list[dict[str, TensorType]]:
    """Divide the tensors, in order, into the fewest shards of at most ``most`` bytes."""
    parts: list[dict[str, TensorType]] = [{}]
    room = most
    for name, kind in kinds.items():
        if parts[-1] and kind.nbytes > room:
            parts.append({})
            room = most
        parts[-1][name] = kind
        room -= kind.nbytes
    return parts


def weight_files(
    kinds: Mapping[str, TensorType], tensors: Iterable[tuple[str, Tensor]], most: int = PART_BYTES
) -> Iterator[tuple[str, Content]]:
    """Yield names and contents of the files: one if all tensors fit, otherwise shards and their index.

    ``tensors`` must come in the order of ``kinds``. Raises ``ValueError`` if name, dtype or shape differs.
    """
    parts, left = divide_into_shards(kinds, most), iter(tensors)
    names = [f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
    if len(parts) == 1:
        names = [WHOLE]
    for name, part in zip(names, parts, strict=True):
        yield name, shard_bytes(part, left)
    if len(parts) > 1:
        places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        size = sum(kind.nbytes for kind in kinds.values())
        yield INDEX, [json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2).encode()]


def shard_bytes(part: Mapping[str, TensorType], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a shard, taking the next tensors from the iterator."""
    yield safetensors_header(part, METADATA)
    for expected, kind in part.items():
        name, tensor = next(tensors, ("nothing", None))
        if tensor is None or (name, tensor.dtype, tuple(tensor.shape)) != (expected, *kind):
            raise ValueError(f"{name} came in place of {expected}, {kind.dtype} {list(kind.shape)}")
        yield raw_bytes(tensor.cpu())


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
    ends: dict[str, object] = {"bos_token_id": model.document_start, "eos_token_id": end} if end >= 0 else {}
    if end < 0 and stops:
        ends = {"eos_token_id": stops[0] if len(stops) == 1 else list(stops)}
    yield CONFIG, [json.dumps(to_hugging_face(config) | ends, indent=2).encode()]
    kinds = {name: TensorType(torch.float32, shape) for name, shape in plain_shapes(model).items()}
    yield from weight_files(kinds, ((name, tensor.float()) for name, tensor in merged_tensors(model)), most)
