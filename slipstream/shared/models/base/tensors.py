"""Tensors of a base; every process reads only the slices that it holds.

Whole rows of a tensor are read as stored, in chunks, without extra bytes. A slice of the columns is read from a local
file row by row, also without extra bytes. A store returns the bytes from the first needed row to the last, as a request
per row would take longer than the bytes in between. Memory beyond the slice is one chunk (one row if that is larger),
and for a store one per concurrent request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.shared.artifacts.prepared.token_rows import INDEX, WHOLE
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.network import plain_shapes
from slipstream.shared.models.base.directory import BaseDirectory, read_pieces
from slipstream.shared.storage import STORES, ObjectInfo

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


CHUNK_BYTES = 4 << 20
#: Concurrent reads of headers, and concurrent requests to a store.
REQUESTS = 8
#: Number of rows to compare in a sample of two tensors.
COMPARED = 16
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Prefix of our tensor names; files of a network without its output layer lack it.
PREFIX = "model."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Suffix of tensors in old files that are ignored, because the transformer computes them.
COMPUTED = "rotary_emb.inv_freq"


@dataclass
class OpenedBase:
    """Opened base: its tensors by our transformer's names, and how many bytes of values were read."""

    directory: BaseDirectory
    tensors: Mapping[str, TensorHeader]
    bytes_read: int = field(default=0)

    @classmethod
    def open(cls, directory: BaseDirectory) -> OpenedBase:
        """Open a listed base and read only its headers.

        Raises ``UserError`` if it is not a base, or truncated or damaged; ``StorageUnavailable``.
        """
        return cls(directory, our_names(stored_tensors(directory)))

    def check(self, model: nn.Module, *, tied: bool) -> None:
        """Raise ``UserError`` unless the base holds exactly the parameters of ``model`` without adapters.

        If the embedding is ``tied`` to the output layer, a stored output layer is optional and must equal it.
        """
        needed = plain_shapes(model)
        where = self.directory.address
        for name, shape in needed.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise UserError(f"model.base: {where}: lacks the tensor {name}, which its config.json asks for")
            if stored.shape != shape:
                raise UserError(
                    f"model.base: {where}: {name} is {list(stored.shape)}; expected {list(shape)}, by its config.json "
                    "and model.arguments"
                )
            if stored.dtype not in TYPES:
                raise UserError(f"model.base: {where}: {name} is {stored.dtype}; expected one of {', '.join(TYPES)}")
        for name in self.tensors:
            if name not in needed and not (tied and name == HEAD):
                raise UserError(
                    f"model.base: {where}: holds the tensor {name}, which no model of its config.json and "
                    "model.arguments has"
                )

        if tied and HEAD in self.tensors and not self.same(EMBEDDING, HEAD):
            raise UserError(
                f"model.base: {where}: {HEAD} is another tensor than {EMBEDDING}, which it is tied to; expected "
                "model.arguments.tie_word_embeddings false, or the file without it"
            )

    def same(self, first: str, second: str) -> bool:
        """Return True if two tensors are equal in a sample of their rows."""
        if self.tensors[first][1:3] != self.tensors[second][1:3]:
            return False
        rows, columns = self.tensors[first].shape
        places = sorted({place * (rows - 1) // (COMPARED - 1) for place in range(COMPARED)})
        found = torch.empty(2, len(places), columns)
        for row, place in enumerate(places):
            self.fill(found[0, row : row + 1], first, (place, 0))
            self.fill(found[1, row : row + 1], second, (place, 0))
        return torch.equal(found[0], found[1])

    @torch.no_grad()
    def fill(self, part: Tensor, name: str, offsets: Sequence[int]) -> None:
        """Copy a slice of the tensor ``name`` (1D or 2D), starting at ``offsets``, to ``part``, in its dtype.

        Raises ``UserError`` if the file has changed, ``StorageUnavailable``.
        """
        if not part.numel():
            return
        stored = self.tensors[name]
        dtype = TYPES[stored.dtype]
        rows = part.detach() if part.ndim == 2 else part.detach().unsqueeze(1)
        first, column = offsets[0], offsets[1] if part.ndim == 2 else 0
        stride = math.prod(stored.shape[1:]) * dtype.itemsize
        width = rows.shape[1] * dtype.itemsize
        in_store = stored.part.uri.startswith(STORES)
        # A store also returns the bytes in between.
        at_once = max(1, CHUNK_BYTES // (stride if in_store else width))

        def fill_chunk(start: int) -> int:
            target = rows[start : start + at_once]
            place = stored.start + (first + start) * stride + column * dtype.itemsize
            content, apart = read_pieces(stored.part, place, width, stride, len(target))
            values = torch.from_numpy(content).view(dtype)
            target.copy_(values.as_strided(target.shape, (apart // dtype.itemsize, 1)))
            return len(content)

        chunks = range(0, len(rows), at_once)
        if in_store and len(chunks) > 1:
            with ThreadPoolExecutor(REQUESTS) as pool:
                self.bytes_read += sum(pool.map(fill_chunk, chunks))
        else:
            self.bytes_read += sum(map(fill_chunk, chunks))


@dataclass(frozen=True)
class BaseValues:
    """Tensors of a base as the initial values of a model."""

    base: OpenedBase

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        """Fill a parameter's slice; see :class:`~slipstream.shared.models.initial.drawn.InitialValues`."""
        self.base.fill(part, name, offsets)


def stored_tensors(directory: BaseDirectory) -> dict[str, TensorHeader]:
    """Return the tensors of the single file, or of all shards in the index; raises like :meth:`OpenedBase.open`."""
    if WHOLE in directory.files:
        return read_header(directory, WHOLE)
    if INDEX not in directory.files:
        names = sorted(directory.files)
        pickles = next((name for name in names if name.endswith((".bin", ".pt", ".pth"))), "")
        why = f"holds {pickles}, a pickle, which is not opened; " if pickles else ""
        raise UserError(
            f"model.base: {directory.address}: {why or 'holds no weights; '}expected {WHOLE}, or shards with {INDEX}"
        )
    part_of = directory.json(INDEX).get("weight_map")
    if not isinstance(part_of, dict) or not part_of or not all(isinstance(part, str) for part in part_of.values()):
        raise UserError(f"{directory.where(INDEX)}: expected weight_map, which names the file of every tensor")
    parts = sorted(set(part_of.values()))
    missing = next((part for part in parts if part not in directory.files), None)
    if missing is not None:
        raise UserError(f"{directory.where(missing[:200])}: is missing, but {INDEX} names it")
    with ThreadPoolExecutor(REQUESTS) as pool:
        headers = dict(zip(parts, pool.map(lambda part: read_header(directory, part), parts), strict=True))
    found: dict[str, TensorHeader] = {}
    for part, tensors in headers.items():
        for name, tensor in tensors.items():
            if part_of.get(name) != part:
                there = f"in {part_of[name]}" if name in part_of else "nowhere"
                raise UserError(
                    f"{directory.where(part)}: holds the tensor {name}, which is {there} according to {INDEX}"
                )
            found[name] = tensor
    lacking = next((name for name in part_of if name not in found), None)
    if lacking is not None:
        raise UserError(
            f"{directory.where(part_of[lacking])}: lacks the tensor {lacking}, which it has according to {INDEX}"
        )
    return found


def our_names(stored: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Rename the tensors to our transformer's names; drop :data:`COMPUTED` tensors."""
    whole = EMBEDDING in stored or EMBEDDING.removeprefix(PREFIX) not in stored
    return {
        name if whole or name == HEAD else PREFIX + name: tensor
        for name, tensor in stored.items()
        if not name.endswith(COMPUTED)
    }
