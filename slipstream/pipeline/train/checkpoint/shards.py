"""Tensor files of a checkpoint.

PyTorch's distributed checkpoint (DCP) plans the writes and reads; this module performs them. Every rank writes and
hashes one file of raw tensor bytes, little-endian and without gaps. Rank 0 adds ``index.json`` with the dtype, size and
chunks of every tensor. DCP's own format is not used, because it has pickles and no digests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slipstream.shared.artifacts.format import DamagedArtifact, FileRecord, HashingFile, open_file
from slipstream.shared.artifacts.records import from_json, to_json
from slipstream.shared.models.trained import raw_bytes
from slipstream.shared.storage import writing_to

P = TypeVar("P")
INDEX = "index.json"
#: Maximum bytes that are read at once.
READ_BYTES = 4 << 20
#: Minimum number of blocks per file, and limits of their size in bytes. Tensor files are verified and fetched in
#: blocks, because after a change of layout a rank reads small parts of many tensors. The manifest holds 40 bytes per
#: block.
FEWEST_BLOCKS, SMALLEST_BLOCK, LARGEST_BLOCK = 4096, 16 << 10, 1 << 20


class ByteRange(NamedTuple):
    """Byte range of a file: offset and length in bytes."""

    file: str
    start: int
    size: int

    def rows(self, sizes: Sequence[int], first: int, count: int) -> ByteRange:
        """Return the byte range of ``count`` rows, from row ``first``, of the tensor stored in this range.

        ``sizes`` is the tensor's shape; a scalar is one row.
        """
        row_bytes = self.size // max(1, sizes[0] if sizes else 1)
        return ByteRange(self.file, self.start + first * row_bytes, count * row_bytes)


#: Shape and byte range of every stored tensor chunk.
Chunks = dict[MetadataIndex, tuple[Sequence[int], ByteRange]]


@dataclass(frozen=True)
class StoredChunk:
    """Chunk of a tensor: its position in the tensor, its shape, and where its bytes are."""

    offsets: list[int]
    sizes: list[int]
    piece: ByteRange


@dataclass(frozen=True)
class StoredTensor:
    dtype: str
    size: list[int]
    chunks: list[StoredChunk]


#: Contents of ``index.json``: tensor names to entries.
Index = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class FileWriter:
    """Writer of files into ``directory``, with fsync; ``records`` receives their sizes and digests."""

    directory: Path
    records: dict[str, FileRecord]

    def write(self, name: str, chunks: Sequence[bytes | memoryview]) -> None:
        """Write the concatenated ``chunks`` into the new file ``name``.

        Raises ``UserError`` if the disk is full.
        """
        with writing_to(self.directory), (self.directory / name).open("xb") as raw:
            file = HashingFile(raw, block_bytes(sum(len(chunk) for chunk in chunks)))
            for chunk in chunks:
                file.write(chunk)
            raw.flush()
            os.fsync(raw.fileno())
        self.records[name] = file.record()


def block_bytes(size: int) -> int:
    """Return the size of a digest block, a power of two, for a file of ``size`` bytes."""
    largest = min(LARGEST_BLOCK, max(SMALLEST_BLOCK, size // FEWEST_BLOCKS))
    return 1 << largest.bit_length() - 1


def holds_tensors(file: str) -> bool:
    return file.endswith(".bin")


class ForOneCheckpoint:
    """Default methods of a DCP writer or reader that serves one checkpoint and keeps plans unchanged."""

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None: ...

    def prepare_local_plan(self, plan: P) -> P:
        return plan

    def prepare_global_plan(self, plans: list[P]) -> list[P]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class ShardWriter(ForOneCheckpoint, StorageWriter):
    """DCP writer of this rank's tensors to ``tensors-<rank>.bin``; creates the directory."""

    def __init__(self, files: FileWriter, rank: int) -> None:
        self._files = files
        self._name = f"tensors-{rank:05d}.bin"

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None: ...

    def prepare_local_plan(self, plan: P) -> P:
        # Here, because DCP raises the failure of one rank on all ranks.
        with writing_to(self._files.directory):
            self._files.directory.mkdir(parents=True, exist_ok=True)
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, chunks, start = [], list[memoryview](), 0
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)  # DCP was only given tensors
            data = raw_bytes(tensor)
            piece = ByteRange(self._name, start, data.nbytes)
            results.append(WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=piece))
            chunks.append(data)
            start += data.nbytes
        if chunks:
            self._files.write(self._name, chunks)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self._files.write(INDEX, [to_json(index_of(metadata, pieces), dict[str, StoredTensor])])


class ShardReader(ForOneCheckpoint, StorageReader):
    """DCP reader that copies from verified files into the target tensors."""

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory = directory
        self._index = index
        self._metadata, self._chunks = metadata_of(index)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None: ...

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            dtype = self._index[item.storage_index.fqn].dtype
            sizes, piece = self._chunks[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            read_into(target, self._directory, piece, dtype, sizes, item.storage_offsets)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_into(
    target: Tensor, directory: Path, piece: ByteRange, dtype: str, sizes: Sequence[int], offsets: Sequence[int]
) -> None:
    """Fill ``target`` with the part of a stored chunk that starts at ``offsets``.

    ``sizes`` is the chunk's shape. Reads only the rows of that part, at most :data:`READ_BYTES` or one row at once.
    """
    if not target.numel():
        return
    wanted = target if sizes else target.reshape(1)
    step = max(1, READ_BYTES // piece.rows(sizes, 0, 1).size)
    for start in range(0, len(wanted), step):
        count = min(step, len(wanted) - start)
        block = piece.rows(sizes, (offsets[0] if sizes else 0) + start, count)
        part = read_tensor(directory, block, dtype, [count, *sizes[1:]])
        for dimension in range(1, len(sizes)):
            part = part.narrow(dimension, offsets[dimension], target.shape[dimension])
        wanted.narrow(0, start, count).copy_(part)


def read_tensor(directory: Path, piece: ByteRange, dtype: str, sizes: list[int]) -> Tensor:
    """Read a byte range into a new CPU tensor of the shape ``sizes``."""
    kind = getattr(torch, dtype)
    if not piece.size:
        return torch.empty(sizes, dtype=kind)
    with open_file(directory, piece.file) as file:
        file.seek(piece.start)
        data = bytearray(piece.size)
        file.readinto(data)
    return torch.frombuffer(data, dtype=kind).reshape(sizes)


def index_of(metadata: Metadata, pieces: Mapping[MetadataIndex, ByteRange]) -> dict[str, StoredTensor]:
    """Return the contents of ``index.json`` from DCP's metadata and the byte range of every chunk."""
    index: dict[str, StoredTensor] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks: list[StoredChunk] = [
            StoredChunk(list(c.offsets), list(c.sizes), pieces[MetadataIndex(name, c.offsets)]) for c in stored.chunks
        ]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        index[name] = StoredTensor(dtype, list(stored.size), chunks)
    return index


def metadata_of(index: Index) -> tuple[Metadata, Chunks]:
    """Return DCP's metadata and the stored chunks from an index (inverse of :func:`index_of`)."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    chunk_pieces: Chunks = {}
    for name, entry in index.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
        for chunk in entry.chunks:
            chunk_pieces[MetadataIndex(name, torch.Size(chunk.offsets))] = chunk.sizes, chunk.piece
    return Metadata(tensors), chunk_pieces


def load_planner() -> DefaultLoadPlanner:
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def pieces_read(tensors: Mapping[str, Tensor], index: Index) -> Iterator[ByteRange]:
    """Yield the byte ranges that this rank must read to fill ``tensors``.

    From every stored chunk only the needed rows are read.
    """
    metadata, chunks_of = metadata_of(index)
    planner = load_planner()
    planner.set_up_planner(dict(tensors), metadata)
    for item in planner.create_local_plan().items:
        sizes, piece = chunks_of[item.storage_index]
        yield piece.rows(sizes, item.storage_offsets[0], item.lengths[0]) if sizes else piece


def read_index(directory: Path) -> Index:
    """Return the contents of ``index.json`` in ``directory``.

    Raises ``DamagedArtifact`` if the file is malformed.
    """
    with open_file(directory, INDEX) as file:
        index: Index = from_json(file.read(), dict[str, StoredTensor], directory / INDEX)
    return index


def check_index(index: Index, files: Mapping[str, FileRecord], where: str) -> None:
    """Raise ``DamagedArtifact`` if the index is inconsistent.

    Dtypes must be torch's, chunks must lie within the manifest's ``files``, and the chunks of a tensor must add up to
    its size.
    """
    for name, entry in index.items():
        if not isinstance(dtype := getattr(torch, entry.dtype, None), torch.dtype):
            raise DamagedArtifact(
                f"{where}/{INDEX}: {name} has the dtype {entry.dtype!r:.40}, which torch does not have"
            )
        for chunk in entry.chunks:
            piece, sizes, offsets = chunk.piece, chunk.sizes, chunk.offsets
            if piece.file not in files:
                raise DamagedArtifact(f"{where}/{INDEX}: {name} is in {piece.file!r}, which the manifest does not list")
            if (
                not len(entry.size) == len(sizes) == len(offsets)
                or min([piece.start, *sizes, *offsets]) < 0
                or piece.size != math.prod(sizes) * dtype.itemsize
                or piece.start + piece.size > files[piece.file].size
            ):
                raise DamagedArtifact(f"{where}/{INDEX}: {name} has a chunk outside {piece.file}")
        if math.prod(entry.size) != sum(math.prod(chunk.sizes) for chunk in entry.chunks):
            raise DamagedArtifact(f"{where}/{INDEX}: the chunks of {name} do not make the whole tensor")
