"""Weights in parts, as Hugging Face's libraries read them: safetensors files of limited size, and an index that says in
which one each tensor lies. Tensors come one at a time, and no more than one is there beside the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from slipstream.artifacts.hugging_face import INDEX, WHOLE
from slipstream.models.trained import Kind, header, raw_bytes

#: The most bytes of the tensors in a part, unless one alone has more.
PART_BYTES = 5_000_000_000
#: What that library asks for in a file's header: tensors of PyTorch.
METADATA = {"format": "pt"}

#: A file's content, piece by piece, which is to be written before the next file is asked for.
Content = Iterable[bytes | memoryview]


def divided(kinds: Mapping[str, Kind], most: int) -> list[dict[str, Kind]]:
    """The tensors in their order, in as few parts of at most ``most`` bytes as that order allows."""
    parts: list[dict[str, Kind]] = [{}]
    room = most
    for name, kind in kinds.items():
        if parts[-1] and kind.nbytes > room:
            parts.append({})
            room = most
        parts[-1][name] = kind
        room -= kind.nbytes
    return parts


def weight_files(
    kinds: Mapping[str, Kind], tensors: Iterable[tuple[str, Tensor]], most: int = PART_BYTES
) -> Iterator[tuple[str, Content]]:
    """The names and contents of the files: one if all tensors fit into it, otherwise parts and their index.

    ``tensors`` come in the order of ``kinds``. Raises ``ValueError`` if one is not of its kind.
    """
    parts, left = divided(kinds, most), iter(tensors)
    names = [f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors" for number in range(len(parts))]
    if len(parts) == 1:
        names = [WHOLE]
    for name, part in zip(names, parts, strict=True):
        yield name, content(part, left)
    if len(parts) > 1:
        places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        size = sum(kind.nbytes for kind in kinds.values())
        yield INDEX, [json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2).encode()]


def content(part: Mapping[str, Kind], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    """The bytes of a part, whose tensors are the next ones."""
    yield header(part, METADATA)
    for expected, kind in part.items():
        name, tensor = next(tensors, ("nothing", None))
        if tensor is None or (name, tensor.dtype, tuple(tensor.shape)) != (expected, *kind):
            raise ValueError(f"{name} came in place of {expected}, {kind.dtype} {list(kind.shape)}")
        yield raw_bytes(tensor.cpu())
