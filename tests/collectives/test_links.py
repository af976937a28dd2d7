"""Links have the stated rates; a machine without links says why."""

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from harness.links import PAYLOAD
from tests.support.links import linked

#: It compares times.
pytestmark = pytest.mark.alone

SIZE = 4 << 20


def seconds_of_a_bare_loop(iterations: int) -> float:
    buffer = torch.zeros(SIZE // 4)
    dist.all_reduce(buffer)
    taken = []
    for _ in range(iterations):
        started = time.perf_counter()
        dist.all_reduce(buffer)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


@pytest.mark.prove
def test_an_all_reduce_moves_what_a_limited_link_lets_through() -> None:
    with linked(2, mbit=200) as links:
        seconds = max(links.in_world(seconds_of_a_bare_loop, 7))
    # In a ring of two each rank sends as many bytes as the buffer has.
    assert SIZE * 8 / seconds == pytest.approx(PAYLOAD * 200e6, rel=0.05)


@pytest.mark.prove
def test_ranks_that_are_not_limited_are_fast_beside_one_that_is() -> None:
    with linked(3) as links:
        links.limit_rank(2, 50)
        fast = max(links.in_world(seconds_of_a_bare_loop, 3, world=2))
        slow = max(links.in_world(seconds_of_a_bare_loop, 3))
    assert slow > 5 * fast


def fails_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def test_a_rank_that_fails_is_named() -> None:
    with linked(2) as links, pytest.raises(AssertionError, match=r"(?s)rank [01]: .*(broken on purpose|Connection)"):
        links.in_world(fails_on_one_rank)


def test_without_the_tools_the_test_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(pytest.skip.Exception, match=r"no links of known rate on this machine: .* tc not found"),
        linked(2),
    ):
        pass
