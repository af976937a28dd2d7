"""The measurement, in real process groups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tasks.collectives import measure, operations
from tasks.collectives.config import OPERATIONS, CollectivesConfig
from tasks.distributed.agreement import AgreedUserError
from tests.support.process_group import in_world

CPU = torch.device("cpu")
QUICK = CollectivesConfig(smallest=1000, largest=64_000, factor=8, budget=0.01)


def profile_of_this_rank() -> dict[str, Any] | None:
    return measure.measure(QUICK, CPU)


def test_a_profile_of_three_ranks(tmp_path: Path) -> None:
    profile, *others = in_world(3, tmp_path, profile_of_this_rank)
    assert others == [None, None]
    assert (profile["world"], profile["nodes"], profile["backend"], profile["device"]) == (3, 1, "gloo", "cpu")
    found = {(m["operation"], m["bytes"]): m for m in profile["measurements"]}
    # 1000 bytes are 250 elements for one rank, but 83 for each of three; 64000 are 16000, and 5333 for each.
    assert sorted(found) == sorted(
        [(o, b) for o in ("all_reduce", "broadcast") for b in (1000, 8000, 64000)]
        + [(o, b) for o in ("all_gather", "reduce_scatter") for b in (996, 7992, 63996)]
    )
    factors = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "reduce_scatter": 2 / 3, "broadcast": 1}
    for m in profile["measurements"]:
        assert m["correct"] is True
        assert measure.FEWEST <= m["iterations"] <= measure.MOST
        assert 0 < m["p10_us"] <= m["p50_us"] <= m["p99_us"]
        assert m["algbw_gbps"] == pytest.approx(m["bytes"] / (m["p50_us"] * 1e-6) / 1e9, rel=1e-2, abs=2e-6)
        assert m["busbw_gbps"] == pytest.approx(m["algbw_gbps"] * factors[m["operation"]], rel=1e-2, abs=2e-6)
    assert profile["summary"] == {
        "all_reduce_latency_us": found["all_reduce", 1000]["p50_us"],
        "all_reduce_busbw_gbps": found["all_reduce", 64000]["busbw_gbps"],
    }


def test_one_rank_has_no_bus(tmp_path: Path) -> None:
    (profile,) = in_world(1, tmp_path, profile_of_this_rank)
    assert profile["world"] == 1
    assert profile["summary"]["all_reduce_busbw_gbps"] == 0
    assert profile["summary"]["all_reduce_latency_us"] > 0


def refusals_of_this_rank() -> dict[str, str]:
    """What ``measure_one`` says when rank 1's network is broken in one way after another."""
    broken = dist.get_rank() == 1
    sound = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_single", "broadcast")}
    said: dict[str, str] = {}

    def attempt(fault: str, operation: str, name: str, substitute: Any) -> None:
        if broken:
            setattr(dist, name, substitute)
        try:
            measure.measure_one(operation, 400, 0.001, CPU)
            said[fault] = "nothing"
        except AgreedUserError as refusal:
            said[fault] = refusal.message
        finally:
            for each, function in sound.items():
                setattr(dist, each, function)

    def one_flipped_element(buffer: torch.Tensor) -> None:
        sound["all_reduce"](buffer)
        buffer[7] += 1

    def shares_swapped(gathered: torch.Tensor, mine: torch.Tensor) -> None:
        sound["all_gather_single"](gathered, mine)
        gathered.copy_(gathered.roll(len(mine)))

    def received_but_dropped(buffer: torch.Tensor, root: int) -> None:
        sound["broadcast"](buffer.clone(), root)

    attempt("flipped", "all_reduce", "all_reduce", one_flipped_element)
    attempt("swapped", "all_gather", "all_gather_single", shares_swapped)
    attempt("dropped", "broadcast", "broadcast", received_but_dropped)
    attempt("sound", "all_reduce", "all_reduce", sound["all_reduce"])
    return said


def test_a_wrong_result_is_one_refusal_that_names_operation_size_rank_and_position(tmp_path: Path) -> None:
    first, second = in_world(2, tmp_path, refusals_of_this_rank)
    assert first == second
    assert first["flipped"].startswith("all_reduce of 400 bytes is wrong on rank 1 at position 7: 16 instead of 15 ")
    assert first["swapped"].startswith("all_gather of 400 bytes is wrong on rank 1 at position 0: 1 instead of 0 ")
    assert "(100 of 100 elements differ)" in first["swapped"]
    assert first["dropped"].startswith("broadcast of 400 bytes is wrong on rank 1 at position 0: -1 instead of 0 ")
    assert first["sound"] == "nothing"


def sleepy_durations_of_this_rank() -> np.ndarray:
    case = operations.broadcast(dist.get_rank(), dist.get_world_size(), 400, CPU)
    slow = dist.get_rank() == 1

    def run() -> None:
        case.run()
        if slow:
            time.sleep(0.004)

    return measure.durations_us(operations.Case(**{**vars(case), "run": run}), 20, CPU)


def test_an_iteration_takes_as_long_as_on_the_slowest_rank(tmp_path: Path) -> None:
    # The sender of a small broadcast waits for nobody: by its own clock it would know nothing of the slow receiver.
    sender, receiver = in_world(2, tmp_path, sleepy_durations_of_this_rank)
    assert np.array_equal(sender, receiver)
    assert sender.min() >= 4000


def too_large_on_this_rank() -> str:
    try:
        measure.measure(CollectivesConfig(smallest=1 << 50, largest=1 << 50), CPU)
    except AgreedUserError as refusal:
        return refusal.message
    return "nothing"


def test_a_size_beyond_memory_is_refused_by_its_setting(tmp_path: Path) -> None:
    (message,) = in_world(1, tmp_path, too_large_on_this_rank)
    assert message.startswith("collectives.largest: the buffers of all_reduce at 1125899906842624 bytes do not fit")


def test_every_operation_of_the_configuration_exists() -> None:
    assert tuple(operations.CASES) == OPERATIONS
