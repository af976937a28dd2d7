"""Each rank reads, holds and verifies only its part of a checkpoint."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.pipeline.train.checkpoint import shards
from slipstream.pipeline.train.checkpoint.restore import blocks_to_fetch, needed_blocks
from slipstream.pipeline.train.checkpoint.shards import ByteRange, block_bytes, read_into
from slipstream.shared.artifacts.format import FileRecord

BEFORE = 24
WHOLE = torch.randn(37, 5, 3, generator=torch.Generator().manual_seed(0))
ROW_BYTES = 5 * 3 * 4


@pytest.mark.parametrize("block_rows", [1, 4, 100])
@pytest.mark.parametrize(
    ("offsets", "shape"), [((0, 0, 0), (37, 5, 3)), ((8, 0, 0), (11, 5, 3)), ((3, 2, 1), (30, 2, 2))]
)
def test_a_part_of_a_tensor_is_read_by_its_rows_a_block_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    (tmp_path / "tensors").write_bytes(bytes(BEFORE) + WHOLE.numpy().tobytes())
    read: list[int] = []
    original = shards.read_tensor

    def noted(directory: Path, piece: ByteRange, dtype: str, sizes: list[int]) -> torch.Tensor:
        read.append(piece.size)
        return original(directory, piece, dtype, sizes)

    monkeypatch.setattr(shards, "read_tensor", noted)
    monkeypatch.setattr(shards, "READ_BYTES", block_rows * ROW_BYTES + 7)
    target = torch.zeros(shape)
    read_into(target, tmp_path, ByteRange("tensors", BEFORE, WHOLE.nbytes), "float32", [37, 5, 3], offsets)
    expected = WHOLE[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]
    assert torch.equal(target, expected)
    assert max(read) <= block_rows * ROW_BYTES and sum(read) == shape[0] * ROW_BYTES


def test_numbers_and_empty_tensors_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "tensors").write_bytes(torch.tensor(2.5, dtype=torch.float64).numpy().tobytes())
    number = torch.zeros((), dtype=torch.float64)
    read_into(number, tmp_path, ByteRange("tensors", 0, 8), "float64", [], [])
    assert number.item() == 2.5
    read_into(torch.zeros(0, 3), tmp_path, ByteRange("tensors", 0, 0), "float32", [0, 3], [0, 0])


@given(st.data())
def test_the_ranks_of_a_machine_bring_each_block_that_they_need_once(data: st.DataObject) -> None:
    size, step = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 60))
    files = {name: FileRecord(size, "", step, []) for name in ("a.bin", "b.bin")}
    starts = st.tuples(st.sampled_from(sorted(files)), st.integers(0, size - 1))
    drawn = data.draw(st.lists(st.lists(starts, max_size=5), min_size=1, max_size=4))
    pieces = [[ByteRange(file, start, data.draw(st.integers(0, size - start))) for file, start in of] for of in drawn]
    needed = [needed_blocks(of_rank, files) for of_rank in pieces]
    brought = [blocks_to_fetch(needed, rank, len(needed)) for rank in range(len(needed))]
    blocks = [(run.file, block) for of_rank in brought for run in of_rank for block in range(run.first, run.end)]
    assert len(blocks) == len(set(blocks))
    wanted = {(p.file, byte // step) for of in pieces for p in of for byte in range(p.start, p.start + p.size)}
    assert set(blocks) == wanted
    counts = [sum(run.end - run.first for run in of_rank) for of_rank in brought]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (100, 1), (1 << 20, 64), (1 << 30, 4096), (40 << 30, 40960)])
def test_a_file_has_blocks_enough_for_small_parts_and_digests_few_enough_for_a_manifest(size: int, blocks: int) -> None:
    assert -(-size // block_bytes(size)) == blocks
