"""The order of the data: every row once an epoch, equal for every world, fair in every batch, and fast."""

import hashlib
import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.pipeline.train.data_order import (
    ORDER_VERSION,
    GlobalOrder,
    StoredBlocks,
    StoredOrder,
    random_permutation,
    rank_slice,
)
from tests.support.wording import refuses

WORLDS = (1, 2, 3, 4, 8, 64)


def rows_of(order: GlobalOrder, rank: int, world: int, consumed: int) -> np.ndarray:
    """The rows that one rank reads for the batch after ``consumed`` samples."""
    return next(order.plans(rank, world, consumed, consumed + 1)).rows


def epoch_of(order: GlobalOrder, epoch: int) -> list[np.ndarray]:
    first = epoch * order.steps_per_epoch
    return [order.batch(step) for step in range(first, first + order.steps_per_epoch)]


@settings(max_examples=15, deadline=None)
@given(
    segments=st.lists(st.integers(0, 700), min_size=1, max_size=12).filter(any),
    block_rows=st.sampled_from([1, 3, 64, 4096]),
    batch_size=st.integers(1, 300),
    epoch=st.integers(0, 3),
    world=st.integers(1, 70),
)
def test_an_epoch_has_every_row_once_and_only_its_last_batch_is_short(
    segments: list[int], block_rows: int, batch_size: int, epoch: int, world: int
) -> None:
    order = GlobalOrder(StoredBlocks(tuple(segments), block_rows), batch_size, seed=7)
    batches = epoch_of(order, epoch)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(sum(segments)))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    step = epoch * order.steps_per_epoch + len(batches) // 2
    parts = [rows_of(order, rank, world, order.consumed(step)) for rank in range(world)]
    assert np.array_equal(np.concatenate(parts), batches[len(batches) // 2])


@settings(max_examples=200, deadline=None)
@given(
    segments=st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any),
    block_rows=st.sampled_from([1, 3, 17, 64, 4096]),
    batch_size=st.integers(1, 200),
    epoch=st.integers(0, 2),
    world=st.integers(1, 12),
    data=st.data(),
)
def test_plans_have_the_rows_of_the_reference_and_name_their_blocks_in_time(
    segments: list[int], block_rows: int, batch_size: int, epoch: int, world: int, data: st.DataObject
) -> None:
    blocks = StoredBlocks(tuple(segments), block_rows)
    order = GlobalOrder(blocks, batch_size, seed=data.draw(st.integers(0, 9)))
    rank, first = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, order.steps_per_epoch - 1))
    last = data.draw(st.integers(first + 1, min(first + 9, order.steps_per_epoch)))
    start = epoch * order.steps_per_epoch
    plans = list(order.plans(rank, world, order.consumed(start + first), order.consumed(start + last)))
    verified: list[int] = []
    for step, plan in zip(range(first, last), plans, strict=True):
        assert plan.rows.tolist() == order.reference_rows(epoch, step, rank, world)
        assert plan.consumed == order.consumed(start + step + 1)
        assert plan.size == plan.consumed - order.consumed(start + step)
        verified += plan.blocks
        assert {blocks.block_of(row) for row in plan.rows.tolist()} <= set(verified)
    assert len(verified) == len(set(verified)), "a block is verified once"


@pytest.mark.parametrize("batch_size", [256, 1000])
def test_every_world_reads_the_same_ordered_batches(batch_size: int) -> None:
    order = GlobalOrder(StoredBlocks((30_000, 5, 9_001), 1024), batch_size, seed=3)
    steps = range(2 * order.steps_per_epoch)
    whole = [order.batch(step) for step in steps]
    for world in WORLDS:
        readers = [
            GlobalOrder(order.blocks, batch_size, seed=3).plans(r, world, 0, 2 * order.blocks.rows)
            for r in range(world)
        ]
        for step, plans in zip(steps, zip(*readers, strict=True), strict=True):
            assert np.array_equal(np.concatenate([t.rows for t in plans]), whole[step])
            lengths = [len(t.rows) for t in plans]
            size = len(whole[step])
            assert lengths == [(r + 1) * size // world - r * size // world for r in range(world)]
            assert {t.size for t in plans} == {size}
            assert {t.consumed for t in plans} == {order.consumed(step + 1)}


def test_a_share_is_what_the_second_law_says() -> None:
    assert [rank_slice(rank, 3, 10) for rank in range(3)] == [slice(0, 3), slice(3, 6), slice(6, 10)]


def test_epochs_and_seeds_differ_and_equal_ones_do_not() -> None:
    layout = StoredBlocks((10_000,), 512)
    first, again, other = (GlobalOrder(layout, 100, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.batch(150), again.batch(150))
    assert not np.array_equal(first.batch(0), first.batch(100))
    assert not np.array_equal(first.batch(0), other.batch(0))


def test_the_order_is_pinned() -> None:
    """A checkpoint of today must find its place tomorrow: whatever changes this must change the order's version."""
    order = GlobalOrder(StoredBlocks((20_000, 300), 4096), 1000, seed=5)
    rows = np.concatenate([order.batch(step) for step in (0, 20, 21, 400)]).astype("<i8")
    assert len(rows) == 1000 + 300 + 1000 + 1000
    assert (ORDER_VERSION, hashlib.sha256(rows.tobytes()).hexdigest()[:16]) == (2, "6970c33be8c6d3e2")


def test_a_shuffle_gives_every_permutation_equally_often() -> None:
    draws = 12_000
    counts = Counter(tuple(random_permutation(4, 0, epoch, 1).tolist()) for epoch in range(draws))
    assert len(counts) == math.factorial(4)
    chi_square = sum((count - draws / 24) ** 2 / (draws / 24) for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom: more than this comes once in a thousand


def test_a_batch_mixes_blocks_of_the_whole_split() -> None:
    order = GlobalOrder(StoredBlocks((2_000_000,), 4096), 1024, seed=0)
    blocks = [np.unique(order.batch(step) // 4096) for step in range(64)]
    assert min(map(len, blocks)) >= 8
    assert len(np.unique(np.concatenate(blocks))) >= 16


@pytest.mark.parametrize("segments", [(1_400_000, 600_000), (1_900_000, *[9_000] * 11), (4096 * 30, 4096 * 2 + 1)])
def test_every_batch_has_its_share_of_every_segment(segments: tuple[int, ...]) -> None:
    """Nightly segments that differ from the old ones are in each batch in proportion, not in turns.

    A batch's rows of a segment are a difference of four numbers rounded down: less than two from the exact share.
    """
    order = GlobalOrder(StoredBlocks(segments, 4096), 1024, seed=1)
    ends = np.cumsum(segments)
    worth = np.array(segments) * 1024 / sum(segments)
    assert worth.min() > 1
    for step in [*range(50), order.steps_per_epoch - 2]:
        counts = np.bincount(np.searchsorted(ends, order.batch(step), side="right"), minlength=len(segments))
        assert np.abs(counts - worth).max() < 2


def test_parts_that_were_shuffled_together_are_mixed_like_one_segment() -> None:
    """A batch takes from as few blocks as if all lay in one file, and of a later segment its share all the same."""
    parts, later = (10_000,) * 40, 20_000
    order = GlobalOrder(StoredBlocks((*parts, later), 512, (400_000, later)), 1024, seed=3)
    layout, seen = order.blocks, []
    for step in range(order.steps_per_epoch):
        rows = order.batch(step)
        blocks = np.unique(np.searchsorted(layout.first, rows, side="right"))
        assert len(blocks) <= 8 * 4, "four of each lane"
        if len(rows) == 1024:
            assert abs(np.count_nonzero(rows >= 400_000) - 1024 * later / layout.rows) < 2
        seen.append(rows)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(layout.rows))


def test_batch_means_vary_as_chance_has_it() -> None:
    """Within 5 % of σ²/G·(N-G)/(N-1), the variance of means of G rows of N drawn without replacement.

    The two segments have different means, as a new night's data may.
    """
    rows, size, features = (100_000, 31_072), 512, 64
    values = np.random.default_rng(0).normal(size=(sum(rows), features)).astype(np.float32)
    order = GlobalOrder(StoredBlocks(rows, 4096), size, seed=2)
    steps = range(2 * order.steps_per_epoch)
    batches = [batch for batch in map(order.batch, steps) if len(batch) == size]

    def over_ideal(data: np.ndarray) -> float:
        means = np.array([data[batch].mean(axis=0, dtype=np.float64) for batch in batches])
        spread = ((means - data.mean(axis=0, dtype=np.float64)) ** 2).mean(axis=0)
        ideal = data.var(axis=0, dtype=np.float64) / size * (len(data) - size) / (len(data) - 1)
        return float((spread / ideal).mean())

    assert 0.95 < over_ideal(values) < 1.05
    values[rows[0] :] += 1
    assert over_ideal(values) < 1.05


def test_any_batch_of_fifty_million_rows_is_found_in_milliseconds() -> None:
    layout = StoredBlocks((50_000_000,), 4096)

    def seek(step: int) -> float:
        """A fresh process of another world: nothing is remembered of the epoch."""
        order = GlobalOrder(layout, 1024, seed=0)
        started = time.perf_counter()
        assert len(rows_of(order, 37, 64, order.consumed(step))) == 16
        return time.perf_counter() - started

    assert min(seek(step) for step in (0, 3_000_017, 40_000, 123_456_789)) < 0.02


def test_a_start_between_batches_is_refused() -> None:
    order = GlobalOrder(StoredBlocks((1000,), 64), 300, seed=0)
    assert [order.consumed(step) for step in (0, 3, 4, 5)] == [0, 900, 1000, 1300]
    with refuses(ValueError):
        next(order.plans(0, 1, 1400))


def test_evaluation_takes_contiguous_shares_in_stored_order() -> None:
    layout = StoredBlocks((100, 0, 57), 16)
    for world in WORLDS:
        seen = []
        for rank in range(world):
            order = StoredOrder(layout, 20)
            for plan in order.plans(rank, world):
                assert 0 < plan.size == len(plan.rows) <= 20
                seen.append(plan.rows)
        assert np.array_equal(np.concatenate(seen), np.arange(157))
