"""The data that proves a result, and the arithmetic of bandwidth."""

from __future__ import annotations

import pytest
import torch

from tasks.collectives.config import CollectivesConfig
from tasks.collectives.operations import POISON, bus_factor, pattern, summed
from tasks.errors import UserError

CPU = torch.device("cpu")
COUNT = 1 << 16


def test_every_position_tells_the_ranks_apart() -> None:
    first, second, last = (pattern(rank, 0, COUNT, CPU) for rank in (0, 1, 1999))
    assert torch.all(first != second)
    assert torch.all(second != last)


@pytest.mark.parametrize("shift", [1 << n for n in range(15)])
def test_no_shift_by_a_power_of_two_goes_unseen(shift: int) -> None:
    for rank in (0, 1, 2, 3, 15, 51, 1999):
        data = pattern(rank, 0, COUNT, CPU)
        assert torch.all(data[shift:] != data[:-shift])


def test_a_piece_of_the_pattern_is_the_pattern_at_its_positions() -> None:
    assert torch.equal(pattern(5, 1000, 500, CPU), pattern(5, 0, 1500, CPU)[1000:])
    assert torch.equal(summed(5, 1000, 500, CPU), summed(5, 0, 1500, CPU)[1000:])


@pytest.mark.parametrize("world", [1, 2, 3, 64, 2000])
def test_the_expected_sum_is_the_sum_and_exact_in_float32(world: int) -> None:
    count = 6000  # more than the period of the pattern
    exact = sum(pattern(rank, 0, count, CPU).double() for rank in range(world))
    assert isinstance(exact, torch.Tensor)
    assert torch.equal(summed(world, 0, count, CPU).double(), exact)
    assert exact.max() < 2**24


def test_the_poison_is_no_result() -> None:
    assert torch.all(pattern(0, 0, COUNT, CPU) > POISON)
    assert torch.all(summed(1, 0, COUNT, CPU) > POISON)


def test_bus_bandwidth_follows_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert bus_factor("all_gather", 8) == bus_factor("reduce_scatter", 8) == 7 / 8
    assert bus_factor("broadcast", 8) == 1
    assert bus_factor("all_reduce", 1) == 0


def test_sizes_end_with_the_largest() -> None:
    assert CollectivesConfig(smallest=64, largest=1024, factor=4).sizes == [64, 256, 1024]
    assert CollectivesConfig(smallest=64, largest=1000, factor=4).sizes == [64, 256, 1000]
    assert CollectivesConfig(smallest=64, largest=64).sizes == [64]


@pytest.mark.parametrize("operations", [[], ["all_reduce", "all_reduce"], ["all_to_all"]])
def test_operations_that_cannot_be_measured_are_refused(operations: list[str]) -> None:
    with pytest.raises(UserError, match=r"^collectives\.operations(\[0\])?: .*broadcast"):
        CollectivesConfig(operations=operations)
