"""Models of message sizes and of collective operations on times with a known truth."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.shared.interconnect.model.hockney import Compute, fit_hockney
from slipstream.shared.interconnect.model.predictions import (
    SCHEMES,
    Scheme,
    evaluate_schemes,
    message_model,
    model_curve,
    model_lines,
    step_lines,
)
from slipstream.shared.interconnect.profile import Fingerprint, Host, Launch, Measurement, NetworkProfile, Topology
from tests.support.wording import refuses, same_wording

SIZES = [1 << n for n in range(10, 21, 2)]
RING, TREE = SCHEMES["all_reduce"]


def noisy(true: float, rng: np.random.Generator, noise: float) -> float:
    return true * float(np.exp(rng.normal(0, noise)))


def measured(operation: str, world: int, size: int, seconds: list[float]) -> Measurement:
    launches = tuple(Launch((each,)) for each in seconds)
    return Measurement(operation, "float32", "sum", size, world, "loop", True, launches)


def test_latency_and_bandwidth_are_found_and_extrapolated() -> None:
    rng = np.random.default_rng(0)
    truth = lambda size: 200e-6 + size / 25e6  # noqa: E731
    model = fit_hockney({size: [noisy(truth(size), rng, 0.01) for _ in range(3)] for size in SIZES})
    assert model.breaks == ()
    assert model.latency == pytest.approx(200e-6, rel=0.1)
    assert model.bandwidth == pytest.approx(25e6, rel=0.03)
    assert model.seconds(4 << 20).seconds == pytest.approx(truth(4 << 20), rel=0.05)


def test_a_cache_that_ends_is_another_piece() -> None:
    truth = lambda size: 100e-6 + min(size, 65536) / 2e9 + max(0, size - 65536) / 0.4e9  # noqa: E731
    model = fit_hockney({size: [truth(size)] * 3 for size in SIZES})
    assert model.breaks == (65536,)
    assert model.bandwidth == pytest.approx(0.4e9, rel=0.01)


def test_the_interval_holds_the_next_launch_about_19_times_of_20() -> None:
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        truth = lambda size, pace: (200e-6 + size / 25e6) * pace  # noqa: E731
        paces = np.exp(rng.normal(0, 0.05, 4))
        model = fit_hockney({size: [noisy(truth(size, pace), rng, 0.01) for pace in paces[:3]] for size in SIZES})
        held += model.seconds(4 << 20).contains(truth(4 << 20, paces[3]))
    assert 180 <= held <= 200


def test_a_size_that_launches_disagree_about_counts_little() -> None:
    """Medians of launches over a link of 200 Mbit/s, in milliseconds: the smallest waits for processors."""
    measured_ms = {
        8 << 10: [0.31, 1.17, 0.61],
        32 << 10: [1.402, 1.404, 1.401],
        128 << 10: [5.53, 5.517, 5.508],
        512 << 10: [21.965, 21.95, 21.976],
    }
    model = fit_hockney({size: [ms / 1e3 for ms in found] for size, found in measured_ms.items()})
    assert model.seconds(2 << 20).seconds == pytest.approx(87.81e-3, rel=0.01)


def test_no_time_is_negative_or_infinite() -> None:
    falling: dict[float, list[float]] = {size: [1e-3 / (1 + index)] for index, size in enumerate(SIZES)}
    estimate = fit_hockney(falling).seconds(1 << 30)
    assert 0 < estimate.low <= estimate.seconds <= estimate.high < np.inf


def test_too_few_sizes_are_refused() -> None:
    with refuses(ValueError):
        fit_hockney({1024: [1e-3], 2048: [1e-3]})


def times(scheme: Scheme, operation: str, world: int, sizes: list[int], factor: float = 1.0) -> list[Measurement]:
    message = lambda size: 150e-6 + size / 24e6  # noqa: E731
    seconds = {size: factor * scheme.rounds(world) * message(size * scheme.share(world)) for size in sizes}
    return [measured(operation, world, size, [seconds[size]] * 3) for size in sizes]


@pytest.mark.parametrize("scheme", SCHEMES["all_reduce"], ids=lambda scheme: scheme.name)
def test_the_scheme_is_recognised_at_other_worlds(scheme: Scheme) -> None:
    held_out = [m for world in (3, 4, 8) for m in times(scheme, "all_reduce", world, [4 << 20])]
    verdicts = []
    for assumed in (RING, TREE):
        message = message_model(assumed, times(scheme, "all_reduce", 2, SIZES))
        verdict = evaluate_schemes("all_reduce", message, held_out)
        verdicts.append(verdict.scheme)
    assert verdicts[(RING, TREE).index(scheme)] == scheme


def test_an_operation_that_takes_twice_as_long_follows_none() -> None:
    message = message_model(RING, times(RING, "all_reduce", 2, SIZES))
    ring = SCHEMES["reduce_scatter"][0]
    slow = evaluate_schemes("reduce_scatter", message, times(ring, "reduce_scatter", 4, [4 << 20], factor=2.0))
    assert slow.scheme is None
    same_wording(str(slow))
    assert evaluate_schemes("reduce_scatter", message, times(ring, "reduce_scatter", 4, [4 << 20])).scheme == ring


def test_an_operation_without_a_scheme_is_not_predicted() -> None:
    message = message_model(RING, times(RING, "all_reduce", 2, SIZES))
    assert evaluate_schemes("all_to_allv", message, [measured("all_to_allv", 2, 1 << 20, [1e-3])]).scheme is None


COMPUTE = Compute(0.1, 0.2, 0.05, (4 << 20,) * 4)
LOOPBACK, NETWORK = ("lo (127.0.0.1)",), ("eth0 (10.0.0.1)", "eth0 (10.0.0.2)")


def profile(transports: tuple[str, ...], cores: int) -> NetworkProfile:
    measurements = [
        *times(RING, "all_reduce", 4, [size * 4 for size in SIZES]),
        *times(SCHEMES["broadcast"][0], "broadcast", 4, SIZES),
        *times(SCHEMES["reduce_scatter"][0], "reduce_scatter", 4, SIZES, factor=2.0),
    ]
    fingerprint = Fingerprint(4, 1, "gloo", ("cpu",) * 4, (), "", {"torch": "2.13"})
    topology = Topology((Host((0, 1, 2, 3), "cpu", cores, 1),), transports)
    return NetworkProfile(fingerprint, 0.0, tuple(measurements), topology)


def test_the_report_says_what_is_followed_and_what_to_expect() -> None:
    said = list(model_lines(profile(NETWORK, 2)))
    same_wording(said[0])
    same_wording(said[1])
    same_wording(said[2])
    assert said[3].startswith("all_reduce of 4194304 bytes between 8 ranks: 308 ms (")


def test_the_curve_goes_through_what_was_measured_and_is_none_where_nothing_is_explained() -> None:
    curve = model_curve(profile(NETWORK, 2))
    measured_ = profile((), 2).of("all_reduce")
    assert (curve[0].bytes, curve[-1].bytes) == (measured_[0].bytes, measured_[-1].bytes)
    for point, m in ((curve[0], measured_[0]), (curve[-1], measured_[-1])):
        assert point.low <= m.p50 * 1.0001 and m.p50 <= point.high * 1.0001
        assert point.seconds == pytest.approx(m.p50, rel=0.02)
    assert model_curve(profile(LOOPBACK, 2)) == []


def test_ranks_that_share_cores_over_loopback_are_not_predicted() -> None:
    assert list(model_lines(profile(LOOPBACK, 2))) == ["4 ranks share 2 cores over loopback: no prediction"]
    # No line names 16 ranks, which the run does not have.
    assert list(model_lines(profile(LOOPBACK, 8)))[-1].startswith(
        "all_reduce of 4194304 bytes between 8 ranks: 308 ms ("
    )
    steps = list(step_lines(profile(LOOPBACK, 8), COMPUTE))
    assert [line.split(":")[0] for line in steps] == ["a step between 4 ranks", "a step between 8 ranks"]
    (said,) = step_lines(profile(LOOPBACK, 2), COMPUTE)
    same_wording(said)


def test_what_a_latency_and_a_bandwidth_do_not_explain_is_not_predicted() -> None:
    good = profile(NETWORK, 8)
    wild = [measured("all_reduce", 4, size, [1e-3 * (1 + 9 * (at % 2))]) for at, size in enumerate(SIZES)]
    bad = replace(good, measurements=tuple(wild))
    assert [line for line in model_lines(bad) if "do not explain" in line and "no prediction" in line] == list(
        model_lines(bad)
    )
    (said,) = step_lines(bad, COMPUTE)
    same_wording(said)


def test_steps_of_a_model_between_more_ranks() -> None:
    said = list(step_lines(profile(NETWORK, 2), COMPUTE))
    assert [line.partition(":")[0] for line in said] == [f"a step between {world} ranks" for world in (4, 8, 16)]
    same_wording(said[0])


def test_why_no_steps_are_predicted_is_said() -> None:
    good = profile(NETWORK, 2)
    (said,) = step_lines(None, COMPUTE)
    same_wording(said)
    (said,) = step_lines(replace(good, measurements=good.measurements[:2]), COMPUTE)
    same_wording(said)
    (said,) = step_lines(replace(good, fingerprint=replace(good.fingerprint, world=1)), COMPUTE)
    same_wording(said)


def several_worlds(scheme: Scheme, factor: float = 1.0) -> NetworkProfile:
    """A profile of 4 ranks, measured between 2 and 3 of them, too; all 4 take ``factor`` times as long as they would by
    the scheme."""
    sizes = [4 * size for size in SIZES]
    smaller = [m for world in (2, 3) for m in times(scheme, "all_reduce", world, sizes)]
    return replace(profile(NETWORK, 8), measurements=(*times(scheme, "all_reduce", 4, sizes, factor=factor), *smaller))


@pytest.mark.parametrize("scheme", SCHEMES["all_reduce"], ids=lambda scheme: scheme.name)
def test_what_all_reduce_follows_is_told_by_the_numbers_of_processes(scheme: Scheme) -> None:
    whole = several_worlds(scheme)
    said = list(model_lines(whole))
    assert said[0].startswith(f"all_reduce follows the {scheme.name} (")
    same_wording(said[0])
    assert f"as all_reduce is a {scheme.name}" in said[1]
    # By the other scheme 8 ranks would take another time.
    (truth,) = times(scheme, "all_reduce", 8, [4 << 20])
    assert said[2].startswith(f"all_reduce of 4194304 bytes between 8 ranks: {truth.p50 * 1e3:.3g} ms (")
    assert model_curve(whole)[-1].seconds == pytest.approx(whole.of("all_reduce")[-1].p50, rel=0.02)


def test_more_processes_that_follow_nothing_known_are_not_predicted() -> None:
    whole = several_worlds(RING, factor=1.5)
    (said,) = model_lines(whole)
    assert said.endswith("prediction")
    same_wording(said)
    assert model_curve(whole) == []
    (said,) = step_lines(whole, COMPUTE)
    same_wording(said)
