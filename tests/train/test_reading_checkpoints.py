"""What a rank reads, holds and verifies of a checkpoint: its part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.artifacts import format as artifacts
from tasks.artifacts.format import ArtifactWriter, DamagedArtifact
from tasks.distributed.peers import Peers
from tasks.train.checkpoint import shards
from tasks.train.checkpoint.publish import KIND
from tasks.train.checkpoint.restore import open_verified
from tasks.train.checkpoint.shards import Piece, read_into

BEFORE = 24
WHOLE = torch.randn(37, 5, 3, generator=torch.Generator().manual_seed(0))
ROW_BYTES = 5 * 3 * 4


@pytest.mark.parametrize("block_rows", [1, 4, 100])
@pytest.mark.parametrize(
    ("offsets", "shape"), [((0, 0, 0), (37, 5, 3)), ((8, 0, 0), (11, 5, 3)), ((3, 2, 1), (30, 2, 2))]
)
def test_a_part_of_a_tensor_is_read_by_its_rows_a_block_at_a_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_rows: int,
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    (tmp_path / "tensors").write_bytes(bytes(BEFORE) + WHOLE.numpy().tobytes())
    read: list[int] = []
    original = shards.read_tensor

    def noted(directory: Path, piece: Piece, dtype: str, sizes: list[int]) -> torch.Tensor:
        read.append(piece.size)
        return original(directory, piece, dtype, sizes)

    monkeypatch.setattr(shards, "read_tensor", noted)
    monkeypatch.setattr(shards, "BLOCK_BYTES", block_rows * ROW_BYTES + 7)
    target = torch.zeros(shape)
    read_into(target, tmp_path, Piece("tensors", BEFORE, WHOLE.nbytes), "float32", [37, 5, 3], offsets)
    expected = WHOLE[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]
    assert torch.equal(target, expected)
    assert max(read) <= block_rows * ROW_BYTES and sum(read) == shape[0] * ROW_BYTES


def test_numbers_and_empty_tensors_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "tensors").write_bytes(torch.tensor(2.5, dtype=torch.float64).numpy().tobytes())
    number = torch.zeros((), dtype=torch.float64)
    read_into(number, tmp_path, Piece("tensors", 0, 8), "float64", [], [])
    assert number.item() == 2.5
    read_into(torch.zeros(0, 3), tmp_path, Piece("tensors", 0, 0), "float32", [0, 3], [0, 0])


def test_the_ranks_of_a_machine_verify_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ArtifactWriter(tmp_path / "checkpoint")
    names = [f"tensors-{rank:05d}.bin" for rank in range(5)]
    for name in names:
        writer.write_bytes(name, name.encode() * 9)
    directory = writer.finish(KIND, {}).directory
    hashed: list[str] = []
    original = artifacts.hash_file

    def noted(path: Path) -> artifacts.FileRecord:
        hashed.append(path.name)
        return original(path)

    monkeypatch.setattr(artifacts, "hash_file", noted)
    ranks = [Peers(rank, 1, None) for rank in (4, 5)]  # their group is another machine's, too
    for peers in ranks:
        open_verified(peers, directory, [4, 5])
    assert sorted(hashed) == names
    data = bytearray((directory / names[3]).read_bytes())
    data[2] ^= 1
    (directory / names[3]).write_bytes(data)
    open_verified(ranks[0], directory, [4, 5])
    with pytest.raises(DamagedArtifact, match=names[3]):
        open_verified(ranks[1], directory, [4, 5])
