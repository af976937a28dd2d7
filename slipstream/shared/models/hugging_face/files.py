"""Trained transformer in Hugging Face's format: ``config.json`` and weights, adapters merged.

The settings of a fine-tuned model are its base's, except for those that training changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.shared.artifacts.prepared.token_rows import CONFIG, INDEX, WHOLE
from slipstream.shared.models.adapters.network import merged_tensors, plain_shapes
from slipstream.shared.models.base.directory import GENERATION
from slipstream.shared.models.trained import TensorType, raw_bytes, safetensors_header
from slipstream.shared.models.transformer import Transformer
from slipstream.shared.models.transformer_config import TransformerConfig, from_hugging_face, to_hugging_face

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


#: Content of JSON files by name.
BaseSettings = Mapping[str, Mapping[str, Any]]
#: dtypes of weights by their names in ``config.json``, which has one of the keys :data:`DTYPE_KEYS`.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_KEYS = ("dtype", "torch_dtype")


def weights_dtype(wanted: str, base: BaseSettings) -> torch.dtype:
    """Return the dtype named ``wanted``; "auto" is the base's, or float32 without a base."""
    stated = (base.get(CONFIG, {}).get(key) for key in DTYPE_KEYS)
    return DTYPES.get(next((name for name in (wanted, *stated) if name in DTYPES), ""), torch.float32)


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a transformer's parameters to ``dtype``, in place; they stay float32."""
    for parameter in model.parameters() if isinstance(model, Transformer) else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype).float()


def hugging_face_files(
    model: Transformer,
    most: int = PART_BYTES,
    stops: Sequence[int] = (),
    base: BaseSettings = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, Content]]:
    """Yield names and contents of the files that ``AutoModelForCausalLM.from_pretrained`` reads.

    Shards have at most ``most`` bytes; merged weights are rounded to ``dtype`` once. Generation ends at the end tokens
    of ``base`` and at ``stops``, or at the document end. Yields nothing if :func:`transformer_config` is None.
    """
    config = transformer_config(model)
    if config is None:
        return
    ends = end_tokens(model, stops, base)
    settings = changed_settings(config, base) | ends
    key = next((key for key in DTYPE_KEYS if key in settings), DTYPE_KEYS[-1])
    name = next(name for name, known in DTYPES.items() if known == dtype)
    yield CONFIG, [json.dumps(settings | {key: name}, indent=2).encode()]
    if GENERATION in base:
        yield GENERATION, [json.dumps(without_code(base[GENERATION]) | ends, indent=2).encode()]
    kinds = {name: TensorType(dtype, shape) for name, shape in plain_shapes(model).items()}
    yield from weight_files(kinds, ((name, tensor.float().to(dtype)) for name, tensor in merged_tensors(model)), most)


def end_tokens(model: Transformer, stops: Sequence[int], base: BaseSettings) -> dict[str, object]:
    if not base:
        if model.document_end >= 0:
            return {"bos_token_id": model.document_start, "eos_token_id": model.document_end}
        stated: list[object] = []
    else:
        given = (base.get(name, {}).get("eos_token_id") for name in (GENERATION, CONFIG))
        known: Any = next((each for each in given if each is not None), [])
        stated = known if isinstance(known, list) else [known]
    ids = list(dict.fromkeys([*stated, *stops]))
    return {"eos_token_id": ids[0] if len(ids) == 1 else ids} if ids else {}


def changed_settings(config: TransformerConfig, base: BaseSettings) -> dict[str, Any]:
    ours = to_hugging_face(config)
    if CONFIG not in base:
        return ours
    stated = {"max_position_embeddings": config.max_position_embeddings, **from_hugging_face(base[CONFIG], 1)}
    before = to_hugging_face(TransformerConfig.from_dict(stated))
    changed = {name: value for name, value in ours.items() if value != before[name]}
    kept = without_code(base[CONFIG])
    if changed.keys() & {"rope_theta", "rope_scaling"}:
        kept.pop("rope_parameters", None)  # the same in the layout of transformers 5
        changed |= {name: ours[name] for name in ("rope_theta", "rope_scaling")}
    return kept | changed


#: Entries that name code, another form of the weights, or a place.
DROPPED = ("auto_map", "quantization_config", "_name_or_path")
CUSTOM = "custom_"


def without_code(content: Any) -> Any:
    """Return JSON content without the entries :data:`DROPPED`, and those that start with "custom_", at any depth."""
    if isinstance(content, Mapping):
        kept = {name: value for name, value in content.items() if name not in DROPPED and not name.startswith(CUSTOM)}
        return {name: without_code(value) for name, value in kept.items()}
    return [without_code(value) for value in content] if isinstance(content, list) else content
