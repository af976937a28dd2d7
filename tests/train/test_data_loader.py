"""The loader: ordered and verified rows, buffers that stay valid as promised, and a thread that ends."""

import gc
import signal
import threading
import time
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.pipeline.train import data_loader as loader
from slipstream.pipeline.train.batch_buffers import ALIGNMENT, HostBuffer, make_buffer
from slipstream.pipeline.train.data_loader import Batch, StoredRows, evaluation_batches, stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder, rank_slice
from slipstream.pipeline.train.telemetry.step_times import LoaderTimes
from slipstream.shared.artifacts.format import DamagedArtifact
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData
from slipstream.shared.distributed.process_group import RankContext
from tests.support.groups import ALONE, on_cpu
from tests.support.numbered_rows import SIGNATURE, flip_bit, records, write
from tests.support.wording import refuses

CPU = torch.device("cpu")
ROWS = (900, 40, 311)
BLOCK = 64
SIZE = 100


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    rows = records(sum(ROWS))
    segments = np.split(rows, np.cumsum(ROWS)[:-1])
    return write(tmp_path_factory.mktemp("prepared") / "data", {"train": segments, "test": segments}, BLOCK)


def order_of(prepared: PreparedData) -> GlobalOrder:
    return GlobalOrder(stored_blocks(prepared, "train"), SIZE, seed=4)


def row_numbers(batch: Batch) -> list[int]:
    return batch.inputs[1][:, 0].tolist()


def loader_threads() -> int:
    return sum(thread.name == "loader" for thread in threading.enumerate())


def assert_holds(batch: Batch, expected: np.ndarray) -> None:
    """The batch's tensors are the fields of the records ``expected``, bit for bit."""
    for tensor, name in zip((*batch.inputs, batch.target), (*(i.name for i in SIGNATURE.inputs), TARGET), strict=True):
        assert tensor.shape == expected[name].shape
        assert np.array_equal(tensor.numpy(), expected[name])
        assert tensor.numpy().dtype == expected[name].dtype


@pytest.mark.parametrize("world", [1, 2, 3, 64, 128])
def test_ranks_are_given_what_the_order_lists(prepared: PreparedData, world: int) -> None:
    stored, order = records(sum(ROWS)), order_of(prepared)
    for rank in {0, world // 2, world - 1}:
        step = -1
        for step, batch in enumerate(training_batches(prepared, order, on_cpu(rank, world), stop=2 * sum(ROWS))):
            rows = order.batch(step)
            assert_holds(batch, stored[rows[rank_slice(rank, world, len(rows))]])
            assert (batch.size, batch.consumed) == (len(rows), order.consumed(step + 1))
        assert step + 1 == 2 * order.steps_per_epoch == 26


def test_any_start_goes_on_as_if_it_had_never_stopped(prepared: PreparedData) -> None:
    order = order_of(prepared)
    whole = [row_numbers(batch) for batch in training_batches(prepared, order, on_cpu(1, 3), stop=3 * sum(ROWS))]
    for step in (1, 12, 13, 30):
        resumed = training_batches(prepared, order_of(prepared), on_cpu(1, 3), order.consumed(step), 3 * sum(ROWS))
        assert [row_numbers(batch) for batch in resumed] == whole[step:]


def test_evaluation_reads_a_split_once_in_stored_order(prepared: PreparedData) -> None:
    stored = records(sum(ROWS))
    for world in (1, 2, 3):
        at = 0
        for rank in range(world):
            for batch in evaluation_batches(prepared, "test", SIZE, on_cpu(rank, world)):
                assert_holds(batch, stored[at : at + len(batch.target)])
                assert batch.size == len(batch.target) <= SIZE
                at += batch.size
        assert at == sum(ROWS)


@pytest.mark.parametrize("world", [3, 128])
def test_a_share_is_padded_with_its_first_row_or_with_zeros(prepared: PreparedData, world: int) -> None:
    stored, order, missing = records(sum(ROWS)), order_of(prepared), 0
    for step, batch in enumerate(training_batches(prepared, order, on_cpu(1, world), stop=sum(ROWS), padded=50)):
        rows = order.batch(step)
        real = rows[rank_slice(1, world, len(rows))]
        assert batch.rows == len(real) and len(batch.target) == 50
        padding = stored[np.repeat(real[:1], 50 - len(real))] if len(real) else np.zeros(50, stored.dtype)
        assert_holds(batch, np.concatenate([stored[real], padding]))
        missing += not len(real)
    assert bool(missing) == (world == 128)


def test_a_batch_holds_until_the_next_is_asked_for_and_buffers_are_reused(
    prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "BUFFER_BATCHES", 2)
    order, places = order_of(prepared), set()
    offset: Any = SIGNATURE.record.fields[SIGNATURE.inputs[0].name][1]  # type: ignore[index]
    for step, batch in enumerate(training_batches(prepared, order, ALONE, stop=sum(ROWS))):
        time.sleep(0.01)  # the thread is by now as far ahead as it can be
        assert row_numbers(batch) == order.batch(step).tolist()
        places.add(batch.inputs[0].data_ptr())
    assert len(places) == 2 * loader.BUFFERS
    assert all((place - offset) % ALIGNMENT == 0 for place in places)


def test_small_batches_change_hands_several_at_once(prepared: PreparedData) -> None:
    order = order_of(prepared)
    free: SimpleQueue[Any] = SimpleQueue()
    ready: Queue[Any] = Queue()
    for _ in range(3):
        free.put(make_buffer(4, SIZE, SIGNATURE, CPU))
    stored = StoredRows(prepared, "train", order.blocks)
    loader.read_batches(order.plans(0, 1, stop=6 * SIZE), stored, free, ready, LoaderTimes())
    given = [ready.get() for _ in range(3)]
    assert [len(filled) for _, filled in given[:2]] == [4, 2] and given[2] is None


def test_a_split_of_few_batches_has_few_buffers(prepared: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def count(*arguments: Any) -> list[HostBuffer]:
        buffers = make_buffers(*arguments)
        made.append(sum(buffer.batches for buffer in buffers))
        return buffers

    make_buffers = loader.make_buffers
    monkeypatch.setattr(loader, "make_buffers", count)
    rows = sum(ROWS)
    for size in (rows, -(-rows // 4), -(-rows // 7)):
        batches = [row_numbers(batch) for batch in evaluation_batches(prepared, "test", size, ALONE)]
        assert len(batches) == -(-rows // size)
    assert len(list(evaluation_batches(prepared, "test", rows, ALONE, rounds=5))) == 5
    assert made == [3, 6, 9, 6]


@pytest.mark.parametrize("segment", [0, 2])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, segment: int) -> None:
    rows = records(sum(ROWS))
    prepared = write(tmp_path / "data", {"train": np.split(rows, np.cumsum(ROWS)[:-1])}, BLOCK)
    path = prepared.artifact.path(f"train-{segment:05d}.rows")
    hurt = int(prepared.segment_rows("train")[segment]) * 3 // 4
    flip_bit(path, hurt * SIGNATURE.record.itemsize + 5)
    order = order_of(prepared)
    damaged = {sum(ROWS[:segment]) + row for row in range(hurt // BLOCK * BLOCK, (hurt // BLOCK + 1) * BLOCK)}
    given: list[int] = []
    with refuses(DamagedArtifact, match=f"{path}:"):
        for batch in training_batches(prepared, order, ALONE, stop=sum(ROWS)):
            given += row_numbers(batch)
    first = next(step for step in range(order.steps_per_epoch) if damaged & set(order.batch(step).tolist()))
    assert len(given) == first * SIZE, "every whole batch before it was given, and nothing of the damaged block"
    with pytest.raises(DamagedArtifact, match=f"{path}: block {hurt // BLOCK} "):
        list(evaluation_batches(prepared, "train", SIZE, ALONE))
    assert loader_threads() == 0


def test_what_breaks_after_an_epoch_is_found_in_the_next(tmp_path: Path) -> None:
    prepared = write(tmp_path / "data", {"train": [records(1000)]}, BLOCK)
    # More epochs than are read ahead.
    batches = training_batches(prepared, order_of(prepared), ALONE, stop=9000)
    for _ in range(10):
        next(batches)
    flip_bit(prepared.artifact.path("train-00000.rows"), 999 * SIGNATURE.record.itemsize)
    with refuses(DamagedArtifact):
        list(batches)


def test_a_missing_segment_is_the_consumers_error(tmp_path: Path) -> None:
    prepared = write(tmp_path / "data", {"train": [records(1000)]}, BLOCK)
    prepared.artifact.path("train-00000.rows").unlink()
    with pytest.raises(DamagedArtifact, match=r"train-00000\.rows"):
        next(training_batches(prepared, order_of(prepared), ALONE))
    assert loader_threads() == 0


def test_the_thread_ends_with_its_iterator(prepared: PreparedData) -> None:
    order = order_of(prepared)
    assert loader_threads() == 0
    closed = training_batches(prepared, order, ALONE)
    next(closed)
    assert loader_threads() == 1
    closed.close()
    assert loader_threads() == 0

    dropped = training_batches(prepared, order, ALONE)
    next(dropped)
    del dropped
    gc.collect()
    assert loader_threads() == 0

    assert len(list(training_batches(prepared, order, ALONE, stop=sum(ROWS)))) == order.steps_per_epoch
    assert loader_threads() == 0


def test_a_signal_at_the_end_of_its_patience_does_not_make_a_wait_endless(
    prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled, asked = threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        time.sleep(0.2)
        handled.set()

    def gather(*_: object) -> None:
        asked.wait(5)

    monkeypatch.setattr(loader, "PATIENCE_S", 0.3)
    monkeypatch.setattr(StoredRows, "gather", gather)
    batches = training_batches(prepared, order_of(prepared), ALONE, waiting=asked.set)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        next(batches)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled.is_set() and asked.is_set()


def test_waiting_is_measured(prepared: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, asked = StoredRows.gather, threading.Event()

    def held_back(*arguments: object) -> None:
        assert asked.wait(60)
        gather(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StoredRows, "gather", held_back)
    monkeypatch.setattr(loader, "PATIENCE_S", 0.2)
    batches = training_batches(prepared, order_of(prepared), ALONE, waiting=asked.set)
    assert next(batches).wait >= 0.2
    time.sleep(0.5)
    assert next(batches).wait < 0.2
    batches.close()


def test_two_iterators_at_once_do_not_disturb_each_other(prepared: PreparedData) -> None:
    order = order_of(prepared)
    training = training_batches(prepared, order, ALONE, stop=sum(ROWS))
    for step, batch in enumerate(training):
        evaluated = [row for other in evaluation_batches(prepared, "test", SIZE, ALONE) for row in row_numbers(other)]
        assert evaluated == list(range(sum(ROWS)))
        assert row_numbers(batch) == order.batch(step).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batches", [1, 2])
def test_on_a_gpu_a_batch_holds_until_the_work_on_it_is_done(
    batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(loader, "BUFFER_BATCHES", batches)
    rows = 20_000
    prepared = write(tmp_path / "data", {"train": [records(rows)]}, 4096)
    device, order = torch.device("cuda"), GlobalOrder(stored_blocks(prepared, "train"), 4096, seed=0)
    busy, sums = torch.ones(4096, 4096, device=device), []
    for batch in training_batches(prepared, order, RankContext(0, 1, device, "nccl"), stop=3 * rows):
        for _ in range(20):
            busy = busy @ busy / 4096
        # Enqueued behind much work: the buffer is asked for again long before this runs.
        sums.append(batch.inputs[1][:, 0].long().sum() + (busy[0, 0] * 0).long())
    expected = [order.batch(step).sum() for step in range(3 * order.steps_per_epoch)]
    assert [total.item() for total in sums] == expected
