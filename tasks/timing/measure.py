"""Latencies of variants by batch size, and how many times as fast as the reference each is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from tasks.artifacts.prepared.data import Signature
from tasks.artifacts.results.export import LatencyFigures
from tasks.models.predict import Predictor, inputs_of
from tasks.timing.intervals import latency, ratio
from tasks.timing.turns import FEWEST_LOADS, LOADS, Turns, take_turns, torch_threads, turn

#: Calls at one batch size, of all variants together: six of them, loaded three times, in turns of two.
FEWEST_CALLS = 36
#: Loads a variant anew.
Load = Callable[[], Predictor]
#: A glance: so many rounds of turns that last at most so long.
GLANCES = 3
GLANCE_CALLS, GLANCE_SECONDS = 3, 0.003


def measure(
    loads: Mapping[str, Load],
    reference: str,
    signature: Signature,
    records: np.ndarray,
    threads: int,
    seconds: float,
    batches: Sequence[int],
) -> dict[str, dict[str, LatencyFigures]]:
    """The latencies by variant and batch size, measured for about ``seconds`` altogether, with ``threads`` each.

    ``records`` are repeated if there are fewer than a batch.
    """
    order, deadline = np.random.default_rng(0), time.perf_counter() + seconds
    inputs = {rows: inputs_of(signature, np.resize(records, rows)) for rows in batches}
    taken = {rows: {name: Turns() for name in loads} for rows in batches}
    with torch_threads(threads):
        for done in range(LOADS):
            if done >= FEWEST_LOADS and time.perf_counter() > deadline:
                break
            runs = {name: loads[name]() for name in order.permutation(list(loads)).tolist()}
            for rows in batches:
                calls = {name: partial(run, inputs[rows]) for name, run in runs.items()}
                take_turns(calls, taken[rows], seconds / LOADS / len(batches), order)
    found: dict[str, dict[str, LatencyFigures]] = {name: {} for name in loads}
    for rows, turns in taken.items():
        for name, own in turns.items():
            speedup = ratio(own.against(turns[reference])) if name != reference else None
            found[name][str(rows)] = latency(np.array(own.calls), speedup)
    return found


def affordable(
    run: Predictor, signature: Signature, records: np.ndarray, threads: int, seconds: float, batches: Sequence[int]
) -> tuple[int, ...]:
    """Those of the ``batches`` at which ``seconds`` are enough for the fewest calls that show anything; the first in
    any case."""
    found = list(batches[:1])
    with torch_threads(threads):
        for rows in sorted(batches[1:]):
            inputs = inputs_of(signature, np.resize(records, rows))
            taken = turn(partial(run, inputs), calls=1)[0] / 1e9
            if taken * FEWEST_CALLS > seconds:
                break
            found.append(rows)
    return tuple(sorted(found))


def glance(
    runs: Mapping[str, Predictor],
    reference: str,
    signature: Signature,
    records: np.ndarray,
    threads: int,
    batch: int,
    rounds: int,
    until: float = math.inf,
) -> dict[str, list[float]]:
    """How many times as fast as the reference each variant is in some rounds of short turns, at one batch size.

    There is one round, and no further one after ``until`` (``time.perf_counter``). Enough to leave out what is clearly
    slower, and not to say what is faster.
    """
    order, names = np.random.default_rng(0), list(runs)
    inputs, found = inputs_of(signature, np.resize(records, batch)), {name: list[float]() for name in names}
    with torch_threads(threads):
        while len(found[reference]) < rounds:
            took = {}
            for index in order.permutation(len(names)):
                call = partial(runs[names[index]], inputs)
                took[names[index]] = float(np.median(turn(call, GLANCE_CALLS, GLANCE_SECONDS)))
            for name in names:
                found[name].append(took[reference] / took[name])
            if time.perf_counter() > until:
                break
    return found
