"""Latencies: random order, several loads, intervals, and no percentile from too few calls."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from slipstream.pipeline.report.pages.charts import pareto_front
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.results.export import LatencyFigures
from slipstream.shared.comparison import latencies as timing
from slipstream.shared.comparison.latencies import (
    FEWEST_LOADS,
    LOADS,
    TURN_CALLS,
    VariantTimings,
    Workload,
    affordable_batches,
    calls_needed,
    latency_figures,
    measure_latencies,
    paired_figures,
    percentile_estimate,
    screen_speedups,
    speedup_estimate,
    take_turns,
    time_turn,
    torch_threads,
)

NUMERIC = Signature((TensorSpec("numeric", "float32", (3,)),), "regression", "y")


def workload(rows: int) -> Workload:
    return Workload(NUMERIC, np.zeros(rows, NUMERIC.record), 1)


class Machine:
    """A clock that only calls move. A load makes its calls slower or faster for as long as it lives, and a call in a
    turn is the slower the earlier the turn is in its round: what a fixed order would give to the same variant."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.random = 0, np.random.default_rng(seed)
        self.load = 1.0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.clock)

    def loads(self, ms: float) -> Callable[[], Callable[[Any], Any]]:
        def load() -> Callable[[Any], Any]:
            lucky = float(np.exp(self.random.normal(0, 0.03)))

            def run(inputs: Any) -> Any:
                self.load *= float(np.exp(self.random.normal(0, 0.01)))
                self.clock += int(1e6 * ms * lucky * self.load * np.exp(abs(self.random.normal(0, 0.05))))

            return run

        return load


def times_faster(machine: Machine, **ms: float) -> dict[str, Any]:
    loads = {"fp32": machine.loads(1.0), **{name: machine.loads(each) for name, each in ms.items()}}
    found = measure_latencies(loads, "fp32", workload(4), 0.0, (1,))
    return {name: found[name]["1"].speedup for name in ms}


def test_a_copy_is_called_faster_at_most_once_in_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of one file differ by 3 %, the machine drifts; by 1.05 as by default, and even by any margin at all."""
    found = [times_faster(Machine(seed, monkeypatch), copy=1.0)["copy"] for seed in range(100)]
    assert sum(each.low > 1.05 for each in found) <= 1
    assert sum(each.low > 1.0 for each in found) <= 10  # 5 % of 100, and two standard errors
    assert np.median([each.value for each in found]) == pytest.approx(1.0, abs=0.02)


def test_what_is_faster_is_seen_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = times_faster(Machine(0, monkeypatch), twice=0.5, slower=1.25)
    assert found["twice"].low > 1.8 and found["twice"].value == pytest.approx(2.0, rel=0.1)
    assert found["slower"].high < 0.95


def test_the_order_is_drawn_anew_each_round() -> None:
    """In twenty rounds each of the two begins at least once; a fixed order would give all of them to one."""
    called: list[str] = []
    calls = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    order = np.random.default_rng(0)
    for _ in range(20):
        take_turns(calls, {"a": VariantTimings(), "b": VariantTimings()}, 0.0, order)
    rounds = [called[start] for start in range(0, len(called), 2 * (TURN_CALLS + 1))]
    assert len(rounds) == 20 and set(rounds) == {"a", "b"}


def test_every_variant_is_loaded_several_times() -> None:
    loaded: list[str] = []

    def loads(name: str) -> Callable[[], Any]:
        return lambda: loaded.append(name) or (lambda inputs: time.sleep(0.001))  # type: ignore[func-returns-value]

    found = measure_latencies({"a": loads("a"), "b": loads("b")}, "a", workload(7), 0.0, (1, 32))
    assert FEWEST_LOADS >= 3 and sorted(loaded) == ["a"] * FEWEST_LOADS + ["b"] * FEWEST_LOADS
    loaded.clear()
    measure_latencies({"a": loads("a")}, "a", workload(7), 1.0, (1,))
    assert loaded == ["a"] * LOADS
    assert set(found["a"]) == {"1", "32"}
    assert found["a"]["1"].speedup is None and found["b"]["1"].speedup


def test_models_of_seconds_a_call_are_timed_at_fewer_batch_sizes() -> None:
    """5 ms a row: 36 calls of 32 rows are 6 seconds. The batch size that decides is timed in any case."""

    def run(inputs: Any) -> Any:
        time.sleep(0.005 * len(inputs[0]))

    def within(seconds: float, batches: tuple[int, ...]) -> tuple[int, ...]:
        return affordable_batches(run, workload(7), seconds, batches)

    assert within(60.0, (1, 4, 8)) == (1, 4, 8)
    assert within(0.5, (8, 1, 4)) == (1, 8)


def test_batches_larger_than_the_data_are_filled() -> None:
    seen: set[tuple[int, ...]] = set()

    def run(inputs: Any) -> Any:
        seen.add(inputs[0].shape)

    measure_latencies({"a": lambda: run}, "a", workload(7), 0, (1, 256))
    assert seen == {(1, 3), (256, 3)}


def test_the_first_call_of_a_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = 0, 0

    def run() -> None:
        nonlocal clock, calls
        clock += 1_000_000 if calls else 20_000_000
        calls += 1

    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock)
    assert time_turn(run) == [1_000_000] * TURN_CALLS


def test_slow_calls_shorten_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.02)
    assert len(time_turn(lambda: time.sleep(0.03))) == 1


def test_a_percentile_is_quoted_if_ten_calls_lie_beyond_it() -> None:
    assert [calls_needed(share) for share in (0.5, 0.9, 0.99)] == [20, 100, 1000]
    found = latency_figures(np.arange(1, 1000) * 1_000_000, None)
    assert found.p50 and found.p90 and found.p99 is None
    assert latency_figures(np.arange(1, 1001) * 1_000_000, None).p99
    few = latency_figures(np.arange(1, 20) * 1_000_000, None)
    assert replace(few, mean=None, variation=None) == LatencyFigures(None, None, None, 19)
    assert few.mean == 10 and few.variation == pytest.approx((360 / 12) ** 0.5 / 10)


def turns_of(speeds: Mapping[str, float], seed: int) -> dict[str, VariantTimings]:
    """Timings of five loads on a machine whose load changes from round to round.

    A turn has ten calls, or fewer if it would last too long, so faster phases contribute more calls.
    """
    draw, taken = np.random.default_rng(seed), {name: VariantTimings() for name in speeds}
    for _ in range(5):
        luck = {name: float(np.exp(draw.normal(0, 0.03))) for name in speeds}
        for turns in taken.values():
            turns.medians.append([])
        for _ in range(12):
            phase = float(np.exp(draw.normal(0, 0.5)))
            for name, speed in speeds.items():
                drift = phase * float(np.exp(draw.normal(0, 0.05)))
                calls = (1e6 * drift * luck[name] / speed * np.exp(np.abs(draw.normal(0, 0.05, 10)))).astype(int)
                kept = calls[: max(1, int(10 / drift))].tolist()
                taken[name].calls += kept
                taken[name].medians[-1].append(float(np.median(kept)))
    return taken


def front_by_numpy(ratios: Mapping[str, float], losses: Mapping[str, float]) -> set[str]:
    """Names that no other beats in the ratio and in the loss."""
    return {
        name
        for name in ratios
        if not any(ratios[other] >= ratios[name] and losses[other] < losses[name] for other in ratios)
        and not any(ratios[other] > ratios[name] and losses[other] <= losses[name] for other in ratios)
    }


def test_medians_chart_and_choice_have_the_ratio_of_paired_turns() -> None:
    """Five variants of nearly equal speed: medians of all calls give other Pareto fronts than paired turns."""
    speeds, losses = {"fp32": 1.0, "a": 1.50, "b": 1.52, "c": 1.54, "d": 1.56}, [0.0, 0.1, 0.2, 0.3, 0.4]
    lost = dict(zip(speeds, losses, strict=True))
    pooled_fronts_differ = 0
    for seed in range(20):
        taken = turns_of(speeds, seed)
        medians = {name: np.array(own.medians) for name, own in taken.items()}
        ratios = {
            name: float(np.exp(np.mean(np.median(np.log(medians["fp32"] / each), axis=1))))
            for name, each in medians.items()
        }
        found = paired_figures(taken, "fp32")
        p50 = {name: each.p50.value for name, each in found.items() if each.p50}
        for name, ratio in ratios.items():
            assert p50["fp32"] / p50[name] == pytest.approx(ratio)
            speedup, p90 = found[name].speedup, found[name].p90
            assert speedup is None or speedup.value == pytest.approx(ratio)
            assert p90 and p90.value > p50[name]
        expected = front_by_numpy(ratios, lost)
        drawn = pareto_front([(p50[name], lost[name]) for name in speeds])
        assert {name for name in speeds if (p50[name], lost[name]) in drawn} == expected
        pooled = {name: float(np.median(taken["fp32"].calls) / np.median(own.calls)) for name, own in taken.items()}
        pooled_fronts_differ += front_by_numpy(pooled, lost) != expected
    assert pooled_fronts_differ >= 5


def test_a_percentile_and_its_interval_by_hand() -> None:
    """101 calls of 1, 2, … 101 ms: the median is the 51st; its 95 % interval runs from the 41st or so to the 61st."""
    found = percentile_estimate(np.arange(1.0, 102.0), 0.5)
    assert found is not None and found.value == 51
    assert 40 <= found.low <= 42 and 60 <= found.high <= 62


def test_intervals_of_percentiles_cover_the_truth() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        found = percentile_estimate(np.sort(generator.exponential(size=200)), 0.9)
        assert found is not None
        covered += found.low <= np.log(10) <= found.high
    assert covered >= 0.92 * 300


@pytest.mark.parametrize(("calls", "share"), [(20, 0.5), (33, 0.5), (100, 0.9), (330, 0.9), (1000, 0.99)])
def test_an_interval_of_a_percentile_misses_by_the_binomial_distribution(calls: int, share: float) -> None:
    """Of the ranks 0, 1, … the percentile is below that of ``low`` if no more calls than it are below, and above that
    of ``high`` if more are."""
    found = percentile_estimate(np.arange(float(calls)), share)
    assert found is not None
    assert binom.cdf(found.low, calls, share) <= 0.025
    assert binom.sf(found.high, calls, share) <= 0.025


def test_one_load_shows_nothing() -> None:
    """However many rounds it has, the next load may be 3 % slower."""
    found = speedup_estimate([np.full(1000, np.log(2.0))])
    assert found.value == pytest.approx(2.0) and found.low == 0.0


def test_threads_of_torch_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), torch_threads(before + 3):
        assert torch.get_num_threads() == before + 3
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_screening_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of candidates that take seconds a call there is one round, as many as there are."""
    clock, called = 0.0, []

    def slow(name: str) -> Callable[[Any], Any]:
        def run(inputs: Any) -> Any:
            nonlocal clock
            clock += 1.0
            called.append(name)

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(clock * 1e9))
    runs = {name: slow(name) for name in ("fp32", "a", "b")}
    for until, rounds in ((0.0, 1), (1e9, 3)):
        called.clear()
        found = screen_speedups(runs, "fp32", workload(4), 1, 3, until)
        assert found == dict.fromkeys(runs, [1.0] * rounds) and len(called) == 2 * 3 * rounds
