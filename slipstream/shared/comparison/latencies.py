"""Latencies of variants by batch size, and their speedups over the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.artifacts.results.export import Estimate, LatencyFigures
from slipstream.shared.models.predict import ModelFunction, record_inputs

#: Maximum calls and seconds of a turn: short, so that changes of the machine's load affect all variants alike.
TURN_CALLS = 10
TURN_SECONDS = 0.02
#: How often every model is loaded, and the minimum if time runs out. A load's place in memory changes its latency by
#: some percent for its lifetime.
LOADS, FEWEST_LOADS = 5, 3

Call = Callable[[], object]


@dataclass
class VariantTimings:
    """Timings of one variant at one batch size.

    ``calls`` are the nanoseconds of every call, ``medians`` the medians of its turns, one list per load.
    """

    calls: list[int] = field(default_factory=list)
    medians: list[list[float]] = field(default_factory=list)

    def against(self, reference: VariantTimings) -> list[np.ndarray]:
        """Return the log speedups over ``reference`` by round, one array per load."""
        pairs = zip(reference.medians, self.medians, strict=True)
        return [np.log(np.array(theirs) / np.array(ours)) for theirs, ours in pairs]


def take_turns(
    calls: Mapping[str, Call], taken: Mapping[str, VariantTimings], seconds: float, order: np.random.Generator
) -> None:
    """Run rounds of turns for about ``seconds``, at least one, and add them to ``taken`` as a new load.

    In a round, every variant has one turn; the order is random.
    """
    for turns in taken.values():
        turns.medians.append([])
    names, deadline = list(calls), time.perf_counter() + seconds
    while True:
        for index in order.permutation(len(names)):
            nanoseconds = time_turn(calls[names[index]])
            taken[names[index]].calls += nanoseconds
            taken[names[index]].medians[-1].append(float(np.median(nanoseconds)))
        if time.perf_counter() >= deadline:
            return


def time_turn(run: Call, calls: int = TURN_CALLS, seconds: float = TURN_SECONDS) -> list[int]:
    """Run one turn and return the nanoseconds of every call.

    The first call does not count, because the caches still hold another variant's weights.
    """
    run()
    taken: list[int] = []
    while len(taken) < calls and sum(taken) < seconds * 1e9:
        started = time.perf_counter_ns()
        run()
        taken.append(time.perf_counter_ns() - started)
    return taken


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: Minimum number of calls of all variants at one batch size: six variants, loaded three times, in turns of two calls.
FEWEST_CALLS = 36
#: Function that loads a fresh copy of a variant.
Load = Callable[[], ModelFunction]
#: Screening: number of rounds, and maximum calls and seconds of a turn.
SCREENING_ROUNDS = 3
SCREENING_CALLS, SCREENING_SECONDS = 3, 0.003


@dataclass(frozen=True)
class Workload:
    """Rows of prepared data that the timed models predict, and the number of threads."""

    signature: Signature
    records: np.ndarray
    threads: int

    def inputs(self, rows: int) -> tuple[np.ndarray, ...]:
        """Return the model's inputs for a batch of ``rows`` rows, repeating records if there are fewer."""
        return record_inputs(self.signature, np.resize(self.records, rows))


def measure_latencies(
    loads: Mapping[str, Load],
    reference: str,
    workload: Workload,
    seconds: float,
    batches: Sequence[int],
) -> dict[str, dict[str, LatencyFigures]]:
    """Return latencies by variant and batch size, with speedups over ``reference``.

    The measurement takes about ``seconds`` altogether.
    """
    order, deadline = np.random.default_rng(0), time.perf_counter() + seconds
    inputs = {rows: workload.inputs(rows) for rows in batches}
    taken = {rows: {name: VariantTimings() for name in loads} for rows in batches}
    with torch_threads(workload.threads):
        for done in range(LOADS):
            if done >= FEWEST_LOADS and time.perf_counter() > deadline:
                break
            runs = {name: loads[name]() for name in order.permutation(list(loads)).tolist()}
            for rows in batches:
                calls = {name: partial(run, inputs[rows]) for name, run in runs.items()}
                take_turns(calls, taken[rows], seconds / LOADS / len(batches), order)
    found = {rows: paired_figures(turns, reference) for rows, turns in taken.items()}
    return {name: {str(rows): figures[name] for rows, figures in found.items()} for name in loads}


def paired_figures(taken: Mapping[str, VariantTimings], reference: str) -> dict[str, LatencyFigures]:
    """Return latencies at one batch size by variant.

    The calls of a variant are scaled so that the ratio of its median to the reference's is the one of paired turns.
    Medians of all calls could contradict it, as they depend on how many calls fell into slow phases of the machine.
    """
    median, figures = float(np.median(taken[reference].calls)), dict[str, LatencyFigures]()
    for name, own in taken.items():
        calls, speedup = np.array(own.calls, np.float64), None
        if name != reference:
            speedup = speedup_estimate(own.against(taken[reference]))
            calls *= median / speedup.value / np.median(calls)
        figures[name] = latency_figures(calls, speedup)
    return figures


def affordable_batches(
    run: ModelFunction, workload: Workload, seconds: float, batches: Sequence[int]
) -> tuple[int, ...]:
    """Return the batch sizes at which ``FEWEST_CALLS`` take at most ``seconds``.

    The first of ``batches`` is always included.
    """
    affordable = list(batches[:1])
    with torch_threads(workload.threads):
        for rows in sorted(batches[1:]):
            inputs = workload.inputs(rows)
            taken = time_turn(partial(run, inputs), calls=1)[0] / 1e9
            if taken * FEWEST_CALLS > seconds:
                break
            affordable.append(rows)
    return tuple(sorted(affordable))


def screen_speedups(
    runs: Mapping[str, ModelFunction],
    reference: str,
    workload: Workload,
    batch: int,
    rounds: int,
    deadline: float = math.inf,
) -> dict[str, list[float]]:
    """Return quick estimates of each variant's speedup over the reference, one per round of short turns.

    At least one round is run, and none starts after ``deadline`` (``time.perf_counter``). The estimates suffice to drop
    clearly slower variants, but not to name the fastest.
    """
    order, names = np.random.default_rng(0), list(runs)
    inputs, speedups = workload.inputs(batch), {name: list[float]() for name in names}
    with torch_threads(workload.threads):
        while len(speedups[reference]) < rounds:
            took = {}
            for index in order.permutation(len(names)):
                call = partial(runs[names[index]], inputs)
                took[names[index]] = float(np.median(time_turn(call, SCREENING_CALLS, SCREENING_SECONDS)))
            for name in names:
                speedups[name].append(took[reference] / took[name])
            if time.perf_counter() > deadline:
                break
    return speedups


PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
#: Minimum number of calls above a percentile that is reported.
BEYOND = 10
LEVEL = 0.95


def calls_needed(share: float) -> int:
    """Return the number of calls needed to report a percentile, with ``BEYOND`` of them above it."""
    return round(BEYOND / (1 - share))


def percentile_estimate(sorted_ms: np.ndarray, share: float) -> Estimate | None:
    """Return a percentile of sorted latencies with its 95 % interval; None for too few calls.

    The interval lies between order statistics whose ranks come from the binomial distribution (David and Nagaraja,
    "Order Statistics", 2003, section 7.1). It assumes independent calls.
    """
    from scipy.stats import binom

    calls = len(sorted_ms)
    if calls < calls_needed(share):
        return None
    below, above = binom.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2], calls, share).astype(int)
    low, high = sorted_ms[np.clip([below - 1, above], 0, calls - 1)]
    return Estimate(float(np.quantile(sorted_ms, share)), float(low), float(high))


def speedup_estimate(logarithms: Sequence[np.ndarray]) -> Estimate:
    """Return the speedup from the log ratios of paired turns, one array per load of the model.

    Two loads of one file differ by some percent, so rounds with one load are not independent. Each load gives one
    value, the median of its rounds. Student's distribution of their mean gives a 95 % limit on each side.
    """
    from scipy.stats import t

    medians = np.array([np.median(each) for each in logarithms])
    mean, loads = float(medians.mean()), len(medians)
    half = float(t.ppf(LEVEL, loads - 1) * medians.std(ddof=1) / np.sqrt(loads)) if loads > 1 else np.inf
    return Estimate(float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(min(mean + half, 50.0))))


def latency_figures(nanoseconds: np.ndarray, speedup: Estimate | None) -> LatencyFigures:
    """Return latency figures of a variant at one batch size from the times of all calls."""
    milliseconds = np.sort(nanoseconds) / 1e6
    quoted = {name: percentile_estimate(milliseconds, share) for name, share in PERCENTILES.items()}
    mean = float(milliseconds.mean())
    variation = float(milliseconds.std()) / mean
    return LatencyFigures(**quoted, calls=len(milliseconds), speedup=speedup, mean=mean, variation=variation)
