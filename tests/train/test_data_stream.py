"""Prepared data that streams from a store: the same batches, a bounded cache, no unverified data."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.pipeline.train.data_loader import evaluation_batches, stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.shared.artifacts.format import MANIFEST, DamagedArtifact
from slipstream.shared.artifacts.prepared.data import SAMPLED_BLOCKS, PreparedData
from slipstream.shared.artifacts.prepared.streamed import (
    StreamedData,
    artifact_size,
    make_stub,
    open_prepared,
    punch_hole,
)
from slipstream.shared.errors import UserError
from slipstream.shared.storage import MissingObject, storage_for
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import REMOTE, Remote
from tests.support.groups import ALONE, on_cpu
from tests.support.numbered_rows import SIGNATURE, flip_bit, records, write
from tests.support.proving import first_few
from tests.support.wording import refuses

CPU = torch.device("cpu")
ROWS = (3000, 40, 1011)
BLOCK = 64
BYTES = BLOCK * SIGNATURE.record.itemsize


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    rows = records(sum(ROWS))
    segments = np.split(rows, np.cumsum(ROWS)[:-1])
    return write(tmp_path_factory.mktemp("prepared") / "data", {"train": segments, "validation": segments[:1]}, BLOCK)


def upload(data: PreparedData, uri: str) -> None:
    storage = storage_for(uri)
    for name in (*data.artifact.files, MANIFEST):
        storage.put(name, data.artifact.path(name).read_bytes())


@pytest.fixture
def uri(store: FaultyS3, whole: PreparedData, tmp_path: Path) -> str:
    upload(whole, f"s3://bucket/{tmp_path.name}/data")
    return f"s3://bucket/{tmp_path.name}/data"


def streamed(uri: str, directory: Path, blocks: int) -> StreamedData:
    data = open_prepared(make_stub(uri, directory, blocks * BYTES))
    assert isinstance(data, StreamedData)
    return data


def numbers(data: PreparedData, rank: int, world: int, epochs: int) -> list[list[int]]:
    order = GlobalOrder(stored_blocks(data, "train"), 100, seed=4)
    batches = training_batches(data, order, on_cpu(rank, world), stop=epochs * sum(ROWS))
    return [batch.inputs[1][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize(("rank", "world"), first_few([(0, 1), (1, 3)]))
def test_what_streams_gives_the_same_batches_in_a_cache_of_a_quarter(
    uri: str, whole: PreparedData, tmp_path: Path, rank: int, world: int
) -> None:
    blocks = -(-sum(ROWS) // BLOCK) // 2 - 2
    data = streamed(uri, tmp_path / "stub", blocks)
    assert numbers(data, rank, world, 2) == numbers(whole, rank, world, 2)
    assert 0 < data.stream.most_bytes <= blocks * BYTES
    if world == 1:
        assert data.stream.fetched_bytes > sum(ROWS) * SIGNATURE.record.itemsize, "nothing had to be fetched again"
    # A row's own number could be right by chance of a stale file; all of a row is compared in evaluation's order.
    expected = evaluation_batches(whole, "validation", 500, ALONE)
    for ours, theirs in zip(evaluation_batches(data, "validation", 500, ALONE), expected, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(ours.inputs, theirs.inputs, strict=True))


def test_what_fits_is_fetched_once(uri: str, tmp_path: Path) -> None:
    data = streamed(uri, tmp_path / "stub", 10_000)
    numbers(data, 0, 1, 3)
    assert data.stream.fetched_bytes == sum(ROWS) * SIGNATURE.record.itemsize == data.stream.most_bytes


@pytest.mark.prove
def test_training_and_evaluation_share_the_cache(uri: str, whole: PreparedData, tmp_path: Path) -> None:
    data = streamed(uri, tmp_path / "stub", 40)
    order = GlobalOrder(stored_blocks(data, "train"), 100, seed=4)
    training = training_batches(data, order, ALONE)
    for _ in range(5):
        next(training)
        rows = [row for batch in evaluation_batches(data, "validation", 200, ALONE) for row in batch.target.tolist()]
        assert rows == records(sum(ROWS))["target"][: ROWS[0]].tolist()
    training.close()
    assert data.stream.most_bytes <= 40 * BYTES


@pytest.mark.parametrize("remote", first_few(REMOTE), indirect=True)
def test_a_store_that_stumbles_is_asked_again(remote: Remote, whole: PreparedData, tmp_path: Path) -> None:
    upload(whole, remote.base)
    data = streamed(remote.base, tmp_path / "stub", 40)
    remote.proxy.inject("GET", "500", "truncate", "reset", "503", "truncate")
    assert numbers(data, 0, 1, 1) == numbers(whole, 0, 1, 1)
    assert len(remote.proxy.fired) == 5


def test_a_flipped_bit_in_the_store_is_named(store: FaultyS3, whole: PreparedData, tmp_path: Path) -> None:
    other = tmp_path / "data"
    shutil.copytree(whole.artifact.directory, other)
    flip_bit(other / "train-00000.rows", 7 * BYTES + 3)
    upload(PreparedData.open(other), "s3://bucket/flipped")
    data = streamed("s3://bucket/flipped", tmp_path / "stub", 40)
    with refuses(DamagedArtifact):
        numbers(data, 0, 1, 1)
    with refuses(DamagedArtifact, match="train-00000.rows:"):
        open_prepared(make_stub("s3://bucket/flipped", tmp_path / "all")).split("train")


@pytest.mark.prove
@pytest.mark.parametrize("size", first_few([None, 100]))
def test_rows_that_are_not_in_the_store_are_named(store: FaultyS3, uri: str, tmp_path: Path, size: int | None) -> None:
    stub = make_stub(uri, tmp_path / "stub")
    storage_for(uri).delete(["train-00001.rows"])
    if size:
        storage_for(uri).put("train-00001.rows", bytes(size))
    with refuses(DamagedArtifact, match=rf"^{uri}/train-00001\.rows:"):
        open_prepared(stub)


@pytest.mark.prove
def test_what_is_read_is_all_that_is_asked_for(uri: str, whole: PreparedData, tmp_path: Path) -> None:
    data = open_prepared(make_stub(uri, tmp_path / "stub"))
    assert isinstance(data, StreamedData) and data.stream.fetched_bytes == 0
    assert data.split("validation").tobytes() == whole.split("validation").tobytes()
    held_out = ROWS[0] * SIGNATURE.record.itemsize
    assert data.stream.fetched_bytes == held_out
    sample = data.sample("train", 100)
    assert sample.tobytes() == whole.sample("train", 100).tobytes() and len(sample) == 100
    # Of each of the segments the last block is short, and the sample has that of the last segment.
    assert held_out + 7 * BYTES < data.stream.fetched_bytes <= held_out + SAMPLED_BLOCKS * BYTES
    assert data.split("train").tobytes() == whole.split("train").tobytes()
    assert data.stream.fetched_bytes == held_out + sum(ROWS) * SIGNATURE.record.itemsize, "a block came twice"


@pytest.mark.parametrize("most", [1, 100, 2000, sum(ROWS) - 1, sum(ROWS), 10_000])
def test_a_sample_is_as_large_as_was_asked_and_spread_over_the_split(whole: PreparedData, most: int) -> None:
    found = whole.sample("train", most)["categorical"][:, 0]
    assert len(found) == min(most, sum(ROWS)) and (np.diff(found) > 0).all()
    if most > 1:
        assert found[0] < BLOCK and found[-1] >= sum(ROWS) - BLOCK
    assert np.diff(found).max(initial=0) <= max(2 * sum(ROWS) // min(most, SAMPLED_BLOCKS - 1), 1)


def test_a_cache_too_small_for_one_batch_names_the_setting(uri: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^profile.data_cache_gib: "):
        numbers(streamed(uri, tmp_path / "stub", 2), 0, 1, 1)


@pytest.mark.prove
def test_a_stub_is_no_prepared_data_for_others(uri: str, tmp_path: Path) -> None:
    stub = make_stub(uri, tmp_path / "stub", 1 << 20)
    with refuses(DamagedArtifact):
        PreparedData.open(stub).split("train")
    assert artifact_size(uri) > sum(ROWS) * SIGNATURE.record.itemsize
    with pytest.raises(MissingObject):
        make_stub(f"{uri}/nothing", tmp_path / "none", 1 << 20)


def test_a_hole_gives_its_bytes_back(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        before = os.fstat(file.fileno()).st_blocks
        punch_hole(file.fileno(), 4096, 1 << 19)
        assert os.fstat(file.fileno()).st_blocks <= before - (1 << 19) // 512
        file.seek(4095)
        assert file.read(3) == b"x\0\0" and os.fstat(file.fileno()).st_size == 1 << 20
