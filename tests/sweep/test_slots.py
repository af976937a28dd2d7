"""Of workers that want the same trial, one gets it; abandoned trials are free."""

from pathlib import Path

import pytest

from slipstream.pipeline.sweep import store as slots
from slipstream.pipeline.sweep.records import TrialProposed
from slipstream.pipeline.sweep.store import OccupiedSlots, SweepStore
from slipstream.pipeline.train.checkpoint.lease import Lease
from slipstream.shared.artifacts.workspaces import Holder


@pytest.fixture(params=["disk", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path)
    request.getfixturevalue("store")
    return f"s3://bucket/{tmp_path.name}"


def occupation(address: str, name: str, attempt: int = 0) -> OccupiedSlots:
    return OccupiedSlots(SweepStore(address, ()), Holder(name, attempt))


def take(by: OccupiedSlots, after: int) -> Lease | None:
    return by.take(0, after, lambda: False, lambda why: None)


def test_one_of_two_gets_it_and_the_other_sees_that(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GLANCE_S", 0.0)
    SweepStore(address, ()).propose(lambda _: TrialProposed({}))
    one, two = occupation(address, "one"), occupation(address, "two")
    assert one.look(0).held is False and two.look(0).held is False
    lease = take(one, 0)
    assert lease and take(two, 0) is None
    assert two.look(0).held is not False
    # The next attempt of the same worker need not wait: this one's end is certain.
    assert occupation(address, "one", attempt=1).look(0).held is False
    lease.end()
    seen = two.look(0)
    assert seen.held is False and seen.attempt == 1
    again = take(two, seen.attempt)
    assert again and occupation(address, "three").look(0).held is not False
    again.end()


def test_a_store_is_not_asked_of_everybody_all_the_time(store: object, tmp_path: Path) -> None:
    address = f"s3://bucket/{tmp_path.name}"
    SweepStore(address, ()).propose(lambda _: TrialProposed({}))
    one, two = occupation(address, "one"), occupation(address, "two")
    lease = take(one, one.look(0).attempt)
    assert lease
    seen = two.look(0)
    assert two.look(0) is seen
    lease.end()
