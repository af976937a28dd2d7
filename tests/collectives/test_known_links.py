"""The benchmark and its conclusions over links with known rates.

Whatever compares two times belongs to `make prove`, which runs alone: other work on the processors makes a link slower,
never faster than its rate.
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.links import PAYLOAD, Links
from slipstream.pipeline.collectives.compare import ENOUGH, compare_profiles, overall_answer
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.findings import slow_ranks_and_links
from slipstream.pipeline.collectives.launch.measurements import measure_group
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.pipeline.collectives.tune.steps import SyntheticModel, measure_compute, time_alternately
from slipstream.shared.interconnect.model.hockney import Compute, predict_step_time
from slipstream.shared.interconnect.model.predictions import (
    SCHEMES,
    AllReduce,
    all_reduce_model,
    evaluate_schemes,
    message_model,
)
from slipstream.shared.interconnect.profile import Launch, NetworkProfile, merge_profiles
from slipstream.shared.interconnect.topology import network_interfaces
from slipstream.shared.interconnect.tuning import DdpSettings
from tests.support.link_profiles import profile_of_this_launch, profile_over, worker_context
from tests.support.links import linked

#: It compares times.
pytestmark = pytest.mark.alone

MB = 1 << 20


def only_all_reduce(**settings: Any) -> CollectivesConfig:
    quiet = {"operations": ["all_reduce"], "modes": ["loop"], "pairs": False, "overlap": False, "launches": 1}
    return CollectivesConfig(**{**quiet, "budget": 0.5, **settings})


def busbw(profile: NetworkProfile) -> float:
    """Bytes a second at the largest size."""
    return profile.of("all_reduce")[-1].busbw() * 1e9


@pytest.mark.prove
def test_nothing_is_faster_than_its_link() -> None:
    with linked(2, 200) as links:
        profile = profile_over(links, only_all_reduce(smallest=4 * MB, largest=4 * MB, budget=1))
    # Over loopback it would be more than ten times as fast.
    assert 0 < busbw(profile) * 8 < 1.05 * PAYLOAD * 200e6


@pytest.mark.prove
@pytest.mark.parametrize("mbit", [50, 200, 800])
def test_the_bus_bandwidth_is_that_of_the_link(mbit: int) -> None:
    with linked(2, mbit) as links:
        profile = profile_over(links, only_all_reduce(smallest=4 * MB, largest=4 * MB, budget=150 / mbit + 1))
    assert busbw(profile) * 8 == pytest.approx(PAYLOAD * mbit * 1e6, rel=0.05)


def bare_loop() -> float:
    buffer, taken = torch.zeros(MB), []
    for _ in range(3):
        dist.all_reduce(buffer)
    for _ in range(10):
        started = time.perf_counter()
        dist.all_reduce(buffer)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


@pytest.mark.prove
def test_launches_agree_with_each_other_and_with_a_bare_loop() -> None:
    config = only_all_reduce(smallest=4 * MB, largest=4 * MB, budget=2, launches=7)
    with linked(2, 200) as links:
        (measured,) = profile_over(links, config).of("all_reduce")
        loop = statistics.median(max(links.in_world(bare_loop)) for _ in range(3))
    medians = [launch.median for launch in measured.launches]
    assert max(medians) / min(medians) < 1.06
    assert measured.p50 == pytest.approx(loop, rel=0.05)


@pytest.mark.prove
def test_most_of_an_all_reduce_over_a_slow_link_is_hidden_behind_computation() -> None:
    with linked(2, 200) as links:
        profile = profile_over(links, only_all_reduce(smallest=4 * MB, largest=4 * MB, overlap=True))
    (overlap,) = profile.overlaps
    assert overlap.hidden >= 0.85


PAIRS = only_all_reduce(smallest=1024, largest=MB, factor=1024, pairs=True, budget=0.1, launches=2)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("limit", "found"),
    [
        pytest.param(lambda links: links.limit_rank(2, 200), "rank 2 is slow", id="rank"),
        pytest.param(lambda links: links.limit_pair(1, 3, 200), "the link between ranks 1 and 3 is slow", id="pair"),
    ],
)
def test_a_slow_rank_and_a_slow_link_are_told_apart(limit: Any, found: str) -> None:
    with linked(4) as links:
        limit(links)
        named = slow_ranks_and_links(profile_over(links, PAIRS))
    assert len(named) == 1
    assert named[0].startswith(found)


@pytest.mark.prove
def test_where_nothing_is_limited_nothing_is_named_19_times_of_20() -> None:
    with linked(4) as links:
        named = [slow_ranks_and_links(profile_over(links, PAIRS)) for _ in range(20)]
    assert sum(map(bool, named)) <= 1, named


#: Stops a process for most of the time, until its own input ends; it always leaves it running.
HOLD = """
import os, select, signal, sys, time
while not select.select([sys.stdin], [], [], 0)[0]:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.06)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.003)
"""


def held_back_profile(config: CollectivesConfig, rank: int) -> NetworkProfile:
    """Of this launch, while ``rank`` is held back."""
    if dist.get_rank() != rank:
        return profile_of_this_launch(config)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(os.getpid())], stdin=subprocess.PIPE):
        return profile_of_this_launch(config)


@pytest.mark.prove
def test_a_process_that_is_held_back_is_a_straggler_and_not_a_slow_link() -> None:
    with linked(4) as links:
        named = slow_ranks_and_links(merge_profiles([links.in_world(held_back_profile, PAIRS, 1)[0] for _ in range(2)]))
    assert len(named) == 1
    assert named[0].startswith("rank 1 is a straggler")


def fitted(links: Links, world: int, largest: int, launches: int = 3) -> NetworkProfile:
    config = only_all_reduce(smallest=16 << 10, largest=largest, factor=4, launches=launches)
    return profile_over(links, config, world=world)


@pytest.mark.prove
def test_sizes_up_to_1_mb_predict_4_mb() -> None:
    ring, _ = SCHEMES["all_reduce"]
    with linked(2, 200) as links:
        whole = fitted(links, 2, 4 * MB, launches=2)
    *small, held_out = whole.of("all_reduce")
    message = message_model(ring, small)
    assert ring.seconds(message, 2, held_out.bytes).seconds == pytest.approx(held_out.p50, rel=0.05)


@pytest.mark.prove
def test_two_ranks_predict_three_and_four() -> None:
    ring, _ = SCHEMES["all_reduce"]
    with linked(4, 200) as links:
        message = message_model(ring, fitted(links, 2, 4 * MB).of("all_reduce"))
        for world in (3, 4):
            profile = profile_over(links, only_all_reduce(smallest=4 * MB, largest=4 * MB, budget=2), world=world)
            (held_out,) = profile.of("all_reduce")
            assert ring.seconds(message, world, held_out.bytes).seconds == pytest.approx(held_out.p50, rel=0.1)
            assert evaluate_schemes("all_reduce", message, [held_out]).scheme == ring


@pytest.mark.prove
def test_smaller_groups_tell_what_all_reduce_follows() -> None:
    with linked(4, 200) as links:
        whole, *smaller = (fitted(links, world, 4 * MB) for world in (4, 2, 3))
    measurements = [m for profile in (whole, *smaller) for m in profile.measurements]
    model = all_reduce_model(replace(whole, measurements=tuple(measurements)))
    assert isinstance(model, AllReduce) and model.tested is not None
    assert model.scheme == SCHEMES["all_reduce"][0]
    assert abs(dict(model.tested.errors)["ring"]) < 0.1


@pytest.mark.prove
def test_gloo_follows_the_ring_in_all_reduce_and_the_tree_in_broadcast_and_neither_in_others() -> None:
    ring, _ = SCHEMES["all_reduce"]
    operations = ["all_reduce", "broadcast", "reduce_scatter", "all_to_all"]
    with linked(4, 200) as links:
        message = message_model(ring, fitted(links, 2, 4 * MB).of("all_reduce"))
        config = only_all_reduce(operations=operations, smallest=4 * MB, largest=4 * MB, budget=2)
        profile = profile_over(links, config)
    verdicts = {name: evaluate_schemes(name, message, profile.of(name)) for name in operations}
    followed = {name: verdict.scheme.name if verdict.scheme else None for name, verdict in verdicts.items()}
    assert followed == {"all_reduce": "ring", "broadcast": "tree", "reduce_scatter": None, "all_to_all": None}, [
        str(verdict) for verdict in verdicts.values()
    ]


def computation(model: SyntheticModel) -> Compute:
    with worker_context() as worker:
        return measure_compute(worker, model)


def seconds_of_a_step(model: SyntheticModel) -> float:
    with worker_context() as worker:
        return statistics.median(time_alternately(worker, model, DdpSettings(), DdpSettings(), 10)[0])


@pytest.mark.prove
def test_a_training_step_takes_as_long_as_predicted_from_two_ranks() -> None:
    ring, _ = SCHEMES["all_reduce"]
    model, errors = SyntheticModel(8), {}
    with linked(4, 200) as links:
        message = message_model(ring, fitted(links, 2, 4 * MB).of("all_reduce"))
        compute = links.in_world(computation, model, world=2)[0]
        for world in (2, 3, 4):
            expected = predict_step_time(compute, partial(ring.seconds, message, world))
            step = links.in_world(seconds_of_a_step, model, world=world)[0]
            errors[world] = expected.step.seconds / step - 1
    assert all(abs(error) <= 0.1 for error in errors.values()), errors


def compared(links: Links) -> NetworkProfile:
    return profile_over(links, only_all_reduce(smallest=MB, largest=MB, launches=4))


@pytest.mark.prove
def test_a_link_that_became_slower_is_found_and_one_that_did_not_is_as_before() -> None:
    with linked(2, 200) as links:
        before, again = compared(links), compared(links)
        for rank in range(2):
            links.limit_sending(rank, 154)
        slower = compared(links)
    assert overall_answer(compare_profiles([before], again)) != "slower"
    assert overall_answer(compare_profiles([before], slower)) == "slower"


@pytest.mark.prove
def test_154_instead_of_200_is_found_20_times_of_20_with_one_false_alarm_at_most() -> None:
    with linked(2, 200) as links, linked(2, 154) as slower:
        answers = []
        for _ in range(20):
            before = compared(links)
            answers.append(
                (
                    overall_answer(compare_profiles([before], compared(links))),
                    overall_answer(compare_profiles([before], compared(slower))),
                )
            )
    assert sum(again == "slower" for again, _ in answers) <= 1, answers
    assert [worse for _, worse in answers] == ["slower"] * 20, answers


def slowed(profile: NetworkProfile, factor: float) -> NetworkProfile:
    def slower(each: Launch) -> Launch:
        return replace(each, seconds=tuple(factor * seconds for seconds in each.seconds))

    measurements = [replace(m, launches=tuple(map(slower, m.launches))) for m in profile.measurements]
    return replace(profile, measurements=tuple(measurements))


@pytest.mark.prove
@pytest.mark.parametrize("address", ["loopback's", "the machine's own"])
def test_within_a_machine_there_is_one_false_alarm_in_20_at_most_and_no_false_comfort(address: str) -> None:
    others = [line.partition(":")[0] for line in network_interfaces()]
    if address != "loopback's" and not others:
        pytest.skip("this machine has no interface but loopback")
    environment = {"GLOO_SOCKET_IFNAME": "lo" if address == "loopback's" else others[0]}
    config = only_all_reduce(smallest=1024, largest=4 * MB, factor=4096, budget=0.1)
    workers = WorkerGroup.local(2, timeout=60)
    profiles = [
        merge_profiles([workers.launch(measure_group, config, environment=environment) for _ in range(4)])
        for _ in range(ENOUGH + 20)
    ]
    assert all(profile.topology.loopback for profile in profiles)
    # Against the one before, and against all before, from as many on as the drift is measured from.
    for most in (1, len(profiles)):
        answers = [
            [
                overall_answer(compare_profiles(profiles[max(0, at - most) : at], slowed(new, factor)))
                for factor in (1, 1.3, 20)
            ]
            for at, new in enumerate(profiles)
            if at >= ENOUGH
        ]
        again, slower, broken = zip(*answers, strict=True)
        assert again.count("slower") <= 1, answers
        assert "as before" not in slower, answers
        assert broken.count("slower") >= 19, answers
