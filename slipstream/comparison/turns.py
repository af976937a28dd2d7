"""Variants are timed in turns whose order is drawn anew each round, over several loads of their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: A turn is at most so many calls and seconds, so that a change of the machine's load affects all variants alike.
TURN_CALLS = 10
TURN_SECONDS = 0.02
#: How often the files are loaded, and at least if the time is over before: where a load puts its memory makes percents
#: of difference while it lives.
LOADS, FEWEST_LOADS = 5, 3

Call = Callable[[], Any]


@dataclass
class Turns:
    """What one variant took at one batch size: nanoseconds of every call, and the medians of its turns by load."""

    calls: list[int] = field(default_factory=list)
    medians: list[list[float]] = field(default_factory=list)

    def against(self, reference: Turns) -> list[np.ndarray]:
        """The logarithms of the reference's median over this one's, round by round, for each load."""
        pairs = zip(reference.medians, self.medians, strict=True)
        return [np.log(np.array(theirs) / np.array(ours)) for theirs, ours in pairs]


def take_turns(
    calls: Mapping[str, Call], taken: Mapping[str, Turns], seconds: float, order: np.random.Generator
) -> None:
    """Add the rounds of one load, for about ``seconds`` and at least one, to what the variants have taken."""
    for turns in taken.values():
        turns.medians.append([])
    names, deadline = list(calls), time.perf_counter() + seconds
    while True:
        for index in order.permutation(len(names)):
            nanoseconds = turn(calls[names[index]])
            taken[names[index]].calls += nanoseconds
            taken[names[index]].medians[-1].append(float(np.median(nanoseconds)))
        if time.perf_counter() >= deadline:
            return


def turn(run: Call, calls: int = TURN_CALLS, seconds: float = TURN_SECONDS) -> list[int]:
    """Nanoseconds of each call of a turn. The first call does not count: the caches still hold another's weights."""
    run()
    taken: list[int] = []
    while len(taken) < calls and sum(taken) < seconds * 1e9:
        started = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - started)
    return taken


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
