"""Slow ranks, slow links and CPU contention are told apart; noise causes no finding."""

from dataclasses import replace

import numpy as np

from slipstream.pipeline.collectives.findings import slow_ranks_and_links
from slipstream.shared.interconnect.profile import Launch, NetworkProfile
from tests.support.network_profiles import launch, measured, network_profile


def test_a_rank_whose_pairs_are_all_slow_is_named_as_a_rank() -> None:
    slow = {(0, 2): 0.017, (1, 2): 0.015, (2, 3): 0.020}
    (said,) = slow_ranks_and_links(network_profile(4, pair_seconds=slow))
    assert said == "rank 2 is slow: each of its pairs takes up to 10.0 times as long as the others"


def test_two_slow_ranks_are_both_named_and_no_link() -> None:
    slow = {(a, b): 0.02 for a in range(6) for b in range(a + 1, 6) if {a, b} & {1, 4}}
    said = slow_ranks_and_links(network_profile(6, pair_seconds=slow))
    assert [line.split(" is ")[0] for line in said] == ["rank 1", "rank 4"]


def test_one_slow_pair_is_a_link() -> None:
    (said,) = slow_ranks_and_links(network_profile(4, pair_seconds={(0, 2): 0.087}))
    assert said == "the link between ranks 0 and 2 is slow: 43.5 times as long as the other pairs"


def noisy(world: int, generator: np.random.Generator) -> NetworkProfile:
    """Pairs as a busy machine gives them: launches differ by half, iterations have a long tail."""
    profile = network_profile(world)

    def times() -> Launch:
        level = 0.002 * np.exp(generator.normal(0, 0.35))
        return Launch(tuple(float(level * np.exp(abs(generator.normal(0, 0.5)))) for _ in range(20)))

    return replace(profile, pairs=tuple(replace(p, launches=tuple(times() for _ in range(3))) for p in profile.pairs))


def test_noise_names_nothing_in_nineteen_of_twenty() -> None:
    generator = np.random.default_rng(0)
    assert sum(bool(slow_ranks_and_links(noisy(4, generator))) for _ in range(200)) <= 10


def test_a_rank_that_is_short_of_its_processor_is_a_straggler_and_no_slow_link() -> None:
    slow = {(0, 1): 0.009, (1, 2): 0.008, (1, 3): 0.009}
    profile = replace(network_profile(4, pair_seconds=slow), products=((0.01, 0.05, 0.01, 0.011),) * 3)
    (said,) = slow_ranks_and_links(profile)
    assert said.startswith("rank 1 is a straggler: the same matmul takes 5.0 times as long on it")


def test_a_rank_that_comes_late_is_a_straggler() -> None:
    late = tuple(launch(0.01, by_rank=(0.01, 0.0101, 0.0004, 0.0102)) for _ in range(3))
    profile = network_profile(4)
    smallest = replace(measured("all_reduce", 64, 4, [0.01]), launches=late)
    (said,) = slow_ranks_and_links(replace(profile, measurements=(smallest, *profile.measurements)))
    assert said.startswith("rank 2 is a straggler: it arrives late: the others wait 10.00 ms for it")


def test_two_ranks_have_one_pair_and_nothing_to_compare_it_with() -> None:
    assert slow_ranks_and_links(network_profile(2, pair_seconds={(0, 1): 5.0})) == ()
    assert slow_ranks_and_links(network_profile(1)) == ()
