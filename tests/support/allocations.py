"""What torch's allocator on the CPU really gives out, by the profiler's allocation events."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: The profiler's name of an allocation or, with negative bytes, of a release.
EVENT = "[memory]"


def allocated(work: Callable[[], object]) -> list[int]:
    """The bytes that ``work`` has allocated after each of its allocations and releases, counted from 0 at its start.
    What was allocated before, and is released in it, does not count."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        work()
    events = [event for event in profile.kineto_results.events() if event.name() == EVENT]
    running, total = [0], 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        running.append(total)
    return running


def peak(work: Callable[[], object]) -> int:
    """The most bytes that ``work`` has at once beyond what there was before."""
    return max(allocated(work))
