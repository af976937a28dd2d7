"""Network profile: percentiles, bandwidths and intervals from raw times, and a JSON round trip."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.shared.artifacts.records import from_tree
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.profile import (
    Fingerprint,
    Host,
    Launch,
    Measurement,
    NetworkProfile,
    Overlap,
    Topology,
    bus_factor,
    merge_profiles,
    read_profile,
    write_profile,
)
from tests.support.wording import refuses, same_wording


def measured(*medians: float, iterations: int = 100, **more: object) -> Measurement:
    """Launches whose iterations lie evenly around their medians, from 0.5 to 1.5 times as long."""
    launches = tuple(Launch(tuple(float(m) * s for s in np.linspace(0.5, 1.5, iterations))) for m in medians)
    case = {"operation": "all_reduce", "dtype": "float32", "reduction": "sum", "bytes": 4_000_000, "world": 4}
    return Measurement(**{**case, "mode": "loop", "in_place": True, **more}, launches=launches)  # type: ignore[arg-type]


def a_profile(*medians: float) -> NetworkProfile:
    return NetworkProfile(
        fingerprint=Fingerprint(4, 2, "gloo", ("a cpu",) * 4, ("eth0 10000 Mbit/s",), "", {"torch": "2.13.0"}),
        measured_at=1_790_000_000.5,
        measurements=(measured(*medians), measured(*medians, mode="barrier")),
        topology=Topology((Host((0, 1), "a cpu", 2, 1), Host((2, 3), "a cpu", 2, 1)), ("eth0 (10.0.0.7)",)),
        pairs=(measured(*medians, operation="send_recv", ranks=(0, 3), world=2),),
        overlaps=(Overlap("all_reduce", "float32", 1 << 20, 4, ((2.0, 1.0, 2.1),)),),
    )


def test_it_comes_back_from_json_as_it_was(tmp_path: Path) -> None:
    profile = a_profile(0.01, 0.011)
    write_profile(tmp_path / "profile", profile, {})
    assert read_profile(tmp_path / "profile") == profile


def test_of_another_version_it_is_refused_in_one_line(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile", a_profile(0.01), {})
    whole = json.loads((tmp_path / "profile/profile.json").read_text())
    del whole["fingerprint"]["backend"]
    with refuses(UserError):
        from_tree(whole, NetworkProfile, "there")


def test_percentiles_are_quoted_with_ten_iterations_beyond_them_only() -> None:
    one = measured(0.01, iterations=100)
    assert one.percentile(10) == pytest.approx(0.0059, rel=0.02)
    assert one.percentile(90) == pytest.approx(0.0141, rel=0.02)
    assert one.percentile(99) is None
    assert measured(0.01, iterations=1000).percentile(99) == pytest.approx(0.0149, rel=0.01)
    assert measured(0.01, iterations=3).p50 == pytest.approx(0.01)


def test_each_launch_counts_alike_however_many_iterations_it_had() -> None:
    long, short = measured(0.01, iterations=1000), measured(0.03, 0.03, iterations=10)
    assert replace(long, launches=long.launches + short.launches).p50 > 0.015


def test_the_interval_is_that_of_the_medians_of_launches() -> None:
    assert measured(0.01, 0.01).interval() is None
    low, high = measured(0.0100, 0.0101, 0.0102).interval() or (0, 0)
    assert 0.0098 < low < 0.0101 < high < 0.0104
    tight = measured(*([0.01] * 5)).interval()
    assert tight == pytest.approx((0.01, 0.01))


def test_bandwidths_follow_nccl_tests() -> None:
    one = measured(0.01)
    assert one.algbw() == pytest.approx(0.4, rel=0.02)
    assert one.busbw() == pytest.approx(0.4 * 2 * 3 / 4, rel=0.02)
    assert replace(one, in_flight=3).algbw(0.01) == pytest.approx(1.2)
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    for operation in ("all_gather", "reduce_scatter", "all_to_all", "all_to_allv", "gather", "scatter"):
        assert bus_factor(operation, 8) == 7 / 8
    for operation in ("broadcast", "reduce", "send_recv"):
        assert (bus_factor(operation, 8), bus_factor(operation, 1)) == (1, 0)


def test_what_is_hidden_is_a_share_of_the_shorter() -> None:
    assert Overlap("all_reduce", "float32", 1, 2, ((2.0, 1.0, 2.1),)).hidden == pytest.approx(0.9)
    assert Overlap("all_reduce", "float32", 1, 2, ((1.0, 1.0, 2.0),)).hidden == 0


def test_launches_of_the_same_case_come_together() -> None:
    both = merge_profiles([a_profile(0.01), a_profile(0.02, 0.03)])
    assert both.launches == 3 and len(both.measurements) == 2 and len(both.pairs) == 1
    assert [round(launch.median, 6) for launch in both.pairs[0].launches] == [0.01, 0.02, 0.03]
    assert len(both.overlaps[0].turns) == 2


def test_the_fingerprint_knows_hardware_versions_and_world() -> None:
    one = a_profile(0.01).fingerprint
    others = (
        replace(one, world=8),
        replace(one, devices=("b",)),
        replace(one, interfaces=("ib0",)),
        replace(one, driver="570"),
        replace(one, libraries={"torch": "2.14.0"}),
    )
    assert len({each.digest for each in (one, *others)}) == 6
    assert replace(one).digest == one.digest and len(one.digest) == 16


@pytest.mark.parametrize(
    ("transports", "loopback"),
    [
        (("lo (127.0.0.1)",), True),
        # Its own address: Linux does not send such a message to the interface.
        (("eth0 (10.0.0.7)",), True),
        (("eth0 (10.0.0.7)", "eth1 (fe80::1%eth1)"), True),
        # Namespaces of one machine.
        (("eth0 (10.0.0.7)", "eth0 (10.0.0.8)"), False),
        (("P2P/CUMEM", "network Socket"), False),
        ((), False),
    ],
)
def test_messages_to_an_address_of_ones_own_never_leave_the_machine(
    transports: tuple[str, ...], loopback: bool
) -> None:
    one, other = Host((0, 1), "a cpu", 2, 1), Host((2, 3), "a cpu", 2, 1)
    assert Topology((one,), transports).loopback == loopback
    assert not Topology((one, other), transports).loopback


def test_what_is_hidden_is_said_and_what_is_not() -> None:
    hidden, slower = (Overlap("all_reduce", "float32", 1024, 2, ((2.0, 2.0, both),)) for both in (2.2, 4.4))
    same_wording(str(hidden))
    same_wording(str(slower))
