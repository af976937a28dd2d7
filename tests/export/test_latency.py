"""Timing: in turns, the first call of a turn left out."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tasks.export.latency import FEWEST_ROUNDS, TURN_CALLS, measure, summary, torch_threads


def test_variants_take_turns_and_the_first_call_of_a_turn_does_not_count() -> None:
    called: list[str] = []
    found = measure({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, seconds=0)
    turns = (["a"] * (TURN_CALLS + 1) + ["b"] * (TURN_CALLS + 1)) * FEWEST_ROUNDS
    assert called == turns
    assert {latency.calls for latency in found.values()} == {TURN_CALLS * FEWEST_ROUNDS}


def test_a_first_call_that_is_slow_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the calls move: 1 ms each, but 20 ms for the first of a turn."""
    clock, calls = 0, 0

    def run() -> None:
        nonlocal clock, calls
        clock += 1_000_000 if calls % (TURN_CALLS + 1) else 20_000_000
        calls += 1

    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock)
    found = measure({"cold": run}, seconds=0)["cold"]
    assert (found.p50, found.p99) == (1, 1)


def test_slow_calls_shorten_their_turn() -> None:
    found = measure({"slow": lambda: time.sleep(0.03)}, seconds=0)["slow"]
    assert found.calls == FEWEST_ROUNDS
    assert found.p50 >= 30


def test_percentiles_by_hand() -> None:
    # 101 calls of 1, 2, ... 101 ms: the median is the 51st, the 99th percentile the 100th.
    found = summary(np.arange(1, 102) * 1_000_000)
    assert (found.p50, found.p99, found.calls) == (51, 100, 101)


def test_threads_of_torch_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), torch_threads(before + 3):
        assert torch.get_num_threads() == before + 3
        raise RuntimeError
    assert torch.get_num_threads() == before
