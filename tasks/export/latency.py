"""Latencies of several variants, measured in turns within one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

#: The variants take turns of at most so many calls and seconds, so that a change of the machine's load affects all of
#: them alike.
TURN_CALLS = 10
TURN_SECONDS = 0.02
#: Rounds of turns that are run even if they exceed the time budget.
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Latency:
    """Milliseconds per call (median and 99th percentile) and the number of calls measured."""

    p50: float
    p99: float
    calls: int


def measure(runs: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, Latency]:
    """Time every function of ``runs`` in turns for about ``seconds`` altogether.

    The first call of each turn is not counted, because the caches still hold another variant's weights.
    """
    taken: dict[str, list[int]] = {name: [] for name in runs}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < FEWEST_ROUNDS or time.perf_counter() < deadline:
        for name, run in runs.items():
            taken[name] += turn(run)
        rounds += 1
    return {name: summary(np.array(nanoseconds)) for name, nanoseconds in taken.items()}


def turn(run: Callable[[], Any]) -> list[int]:
    """Nanoseconds of each call of one turn."""
    run()
    taken: list[int] = []
    while len(taken) < TURN_CALLS and sum(taken) < TURN_SECONDS * 1e9:
        started = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - started)
    return taken


def summary(nanoseconds: np.ndarray) -> Latency:
    p50, p99 = np.percentile(nanoseconds, (50, 99)) / 1e6
    return Latency(float(p50), float(p99), len(nanoseconds))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the block with ``count`` torch threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
