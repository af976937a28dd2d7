"""Files of weights in the format of safetensors, written tensor by tensor: who writes them never holds them all.

``safetensors`` itself takes all tensors at once; the bytes here are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: The format's names of types, in its order: tensors of the last come first in a file.
TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
ORDER = {dtype: place for place, dtype in enumerate(TYPES)}
#: The header ends, and the first tensor begins, at a multiple of this.
ALIGNMENT = 8


class Kind(NamedTuple):
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Weights:
    """Tensors by name that come one at a time, in the order of :func:`in_file_order`."""

    kinds: Mapping[str, Kind]
    tensors: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Weights:
        """Of tensors that are all there."""
        kinds = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls(kinds, lambda: (tensors[name] for name in in_file_order(kinds)))

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file."""
        yield header(self.kinds)
        for tensor in self.tensors():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data


def in_file_order(kinds: Mapping[str, Kind]) -> list[str]:
    return sorted(kinds, key=lambda name: (-ORDER[kinds[name].dtype], name))


def header(kinds: Mapping[str, Kind]) -> bytes:
    """Its own length (uint64, little-endian), and where each tensor lies after it."""
    entries, start = {}, 0
    for name in in_file_order(kinds):
        kind = kinds[name]
        offsets = [start, start + kind.nbytes]
        entries[name] = {"dtype": TYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": offsets}
        start += kind.nbytes
    said = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    said += b" " * (-len(said) % ALIGNMENT)
    return len(said).to_bytes(8, "little") + said
