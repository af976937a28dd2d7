"""Validated headers of safetensors files: type, shape and offset of every tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from slipstream.shared.errors import UserError
from slipstream.shared.models.base.directory import BaseDirectory, read_pieces
from slipstream.shared.storage import ObjectInfo

#: Bytes of the length field before the header, and the longest header (in bytes) that the format allows.
LENGTH_BYTES, LONGEST = 8, 100_000_000
#: Bytes per element of the format's types; sub-byte types are not supported.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
METADATA = "__metadata__"
DAMAGED = "expected a whole safetensors file; download it again"


class TensorHeader(NamedTuple):
    """Tensor in the file ``part``, of the format's type ``dtype``; its data starts at byte ``start``."""

    part: ObjectInfo
    dtype: str
    shape: tuple[int, ...]
    start: int


class DamagedError(Exception):
    """Raised for a damaged header; becomes a ``UserError`` in :func:`read_header`."""


def read_header(directory: BaseDirectory, name: str) -> dict[str, TensorHeader]:
    """Return a file's tensors by name.

    Raises ``UserError`` if the file is truncated or damaged, ``StorageUnavailable``.
    """
    info = directory.files[name]
    try:
        if info.size < LENGTH_BYTES:
            raise DamagedError(f"has {info.size} bytes")
        length = int.from_bytes(read_pieces(info, 0, LENGTH_BYTES, LENGTH_BYTES, 1)[0].tobytes(), "little")
        if length > LONGEST or length > info.size - LENGTH_BYTES:
            raise DamagedError(f"states a header of {length} bytes and has {info.size}")
        return tensors_of(read_pieces(info, LENGTH_BYTES, length, length, 1)[0].tobytes(), info)
    except DamagedError as error:
        raise UserError(f"{directory.where(name)}: is cut or damaged: {error}; {DAMAGED}") from None


def tensors_of(header: bytes, info: ObjectInfo) -> dict[str, TensorHeader]:
    """Return the tensors in a header; raise ``DamagedError`` unless they fill the file without gaps."""
    try:
        entries = json.loads(header.decode(), object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"its header cannot be read ({error})") from None
    if not isinstance(entries, dict):
        raise DamagedError("its header is not a JSON object")
    first = LENGTH_BYTES + len(header)
    room, found, end = info.size - first, dict[str, TensorHeader](), 0
    tensors = {name: entry_of(name, entry) for name, entry in entries.items() if name != METADATA}
    for name, (dtype, shape, (start, stop)) in sorted(tensors.items(), key=lambda item: item[1][2]):
        if stop > room:
            raise DamagedError(f"{name} ends {stop - room} bytes after the file")
        if start != end:
            raise DamagedError(f"{name} starts at byte {start}, and the tensor before it ends at {end}")
        found[name], end = TensorHeader(info, dtype, shape, first + start), stop
    if end != room:
        raise DamagedError(f"{room - end} bytes belong to no tensor")
    return found


def entry_of(name: str, entry: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return type, shape and data offsets from a header's entry; raises ``DamagedError``."""
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(f"{name} states no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DamagedError(f"{name} is of an unknown type, {dtype!r:.40}")
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        raise DamagedError(f"shape or data_offsets of {name} are not sizes")
    start, stop = offsets
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise DamagedError(f"{name} has {stop - start} bytes, but {dtype} {shape} takes another number")
    return dtype, tuple(shape), (start, stop)


def are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found
