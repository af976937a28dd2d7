"""Feasible measurements: limits of backends, of a single process and of memory."""

from pathlib import Path

import pytest

from slipstream.pipeline.collectives.config import OPERATIONS, CollectivesConfig, Operation
from slipstream.pipeline.collectives.launch.measurements import inspect_group, subgroup_ranks
from slipstream.pipeline.collectives.operations import feasibility
from slipstream.pipeline.collectives.operations.feasibility import (
    free_memory,
    memory_needed,
    refuse_too_large,
    requested_kinds,
    select_kinds,
)
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import MEMORY
from tests.support.worker_groups import in_group


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter"])
def test_what_the_backend_lacks_is_refused_beforehand(operation: Operation) -> None:
    config = CollectivesConfig(operations=[operation], dtypes=["float32", "int64"], reductions=["sum", "avg"])
    with pytest.raises(UserError, match=rf"^collectives\.reductions: {operation} by avg .*int64 "):
        select_kinds(config, "gloo", 2)
    assert select_kinds(config, "nccl", 2)[0]
    with pytest.raises(UserError, match=r"^collectives\.reductions"):
        in_group(2, inspect_group, config)


def test_one_process_measures_what_still_makes_sense() -> None:
    asked, left_out = select_kinds(CollectivesConfig(), "gloo", 1)
    assert {kind.operation for kind in asked} == set(OPERATIONS) - {"send_recv"}
    assert left_out == ["send_recv: a single process has no peer to send to"]


def test_all_that_is_asked_for_and_each_once() -> None:
    config = CollectivesConfig(dtypes=["float32", "bfloat16"], reductions=["sum", "max"], in_place=True)
    found = requested_kinds(config)
    assert len(set(found)) == len(found)
    # Two types each: three operations by two reductions, all_gather and reduce_scatter in two places, one barrier.
    assert len(found) == 2 * (2 + 4 + 2 + 2 + 6) + 1


def test_a_size_over_the_memory_of_all_ranks_of_a_host_is_refused() -> None:
    config = CollectivesConfig(operations=["all_gather"], largest=1 << 30)
    asked = requested_kinds(config)
    needed, _ = memory_needed(config, asked)
    assert needed == 3 << 30
    two_hosts = {0: ("a", 7 << 30), 1: ("a", 7 << 30), 2: ("b", 4 << 30), 3: ("c", 4 << 30)}
    refuse_too_large(config, asked, two_hosts)
    with pytest.raises(UserError, match=r"^collectives\.largest: 1073741824 bytes .* all_gather .* 3072 "):
        refuse_too_large(config, asked, {**two_hosts, 3: ("b", 4 << 30)})
    three = CollectivesConfig(operations=["all_gather"], largest=1 << 30, in_flight=[1, 4])
    assert memory_needed(three, asked)[0] == 9 << 30


def test_nothing_is_allocated_before_it_is_refused() -> None:
    config = CollectivesConfig(operations=["all_reduce"], smallest=1 << 50, largest=1 << 50)
    with pytest.raises(UserError, match=r"^collectives\.largest: 1125899906842624 bytes "):
        in_group(2, inspect_group, config)


def test_what_is_free_is_what_the_kernel_says_at_most() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < free_memory()[1] <= int(lines["MemTotal"].split()[0]) << 10


def test_what_others_in_the_control_group_use_is_not_taken_from_the_placements_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feasibility, "memory_limit", lambda: None)
    monkeypatch.setattr(feasibility, "memory_used", lambda: 1 << 40)
    monkeypatch.setenv(MEMORY, "64Mi")
    assert free_memory()[1] == 64 << 20


@pytest.mark.parametrize("operations", [[], ["all_reduce", "all_reduce"], ["gossip"]])
def test_operations_that_cannot_be_measured_are_refused(operations: list[str]) -> None:
    with pytest.raises(UserError, match=r"^collectives\.operations(\[0\])?: .*broadcast"):
        CollectivesConfig(operations=operations)  # type: ignore[arg-type]


def test_sizes_end_with_the_largest() -> None:
    assert CollectivesConfig(smallest=64, largest=1024, factor=4).sizes == [64, 256, 1024]
    assert CollectivesConfig(smallest=64, largest=1000, factor=4).sizes == [64, 256, 1000]
    assert CollectivesConfig(smallest=64, largest=64).sizes == [64]


def test_smaller_groups_take_ranks_from_each_host_in_turn() -> None:
    hosts = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert subgroup_ranks(hosts, 2) == [[0], [4]]
    assert subgroup_ranks(hosts, 5) == [[0, 1, 2], [4, 5]]
    assert subgroup_ranks([(0, 1), (2,)], 2) == [[0], [2]] and subgroup_ranks([(0, 1, 2)], 2) == [[0, 1]]
