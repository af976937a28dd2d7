"""The lease of a checkpoint directory in a store that accepts requests and does not answer them."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.pipeline.sweep.store import OccupiedSlots, SweepStore
from slipstream.pipeline.train.checkpoint import lease as leases
from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory, CheckpointName
from slipstream.pipeline.train.checkpoint.lease import Heartbeat, Lease, LeaseObserver, last_heartbeat
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.storage import StorageUnavailable, call_within, storage_for
from tests.support.faulty_s3 import FaultyS3

HOLDER = Holder("f1", 0, "s3://b/raw/aa/f1-n0-0")


@pytest.fixture
def home(store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointDirectory:
    """A checkpoint directory whose lease expires after 6 s, or 4 s with fast heartbeats."""
    monkeypatch.setattr(leases, "PERIOD_S", 0.6)
    monkeypatch.setattr(leases, "SILENT_PERIODS", 10)
    monkeypatch.setattr(leases, "HASTE_S", 0.5)
    monkeypatch.setattr(leases, "SILENT_IN_HASTE", 8)
    home = CheckpointDirectory(storage_for(f"s3://bucket/{tmp_path.name}/home"))
    call_within(60, lambda: home.storage.list())  # makes the client
    return home


def silence(store: FaultyS3, seconds: float) -> None:
    store.silent_until = time.monotonic() + seconds


@pytest.mark.prove
def test_a_lease_outlives_requests_that_are_not_answered(home: CheckpointDirectory, store: FaultyS3) -> None:
    lost: list[str] = []
    lease = Lease.take(home, HOLDER, lambda: False, lost.append)
    watch = LeaseObserver(home)
    assert watch.look() is not None
    asked = store.refused
    silence(store, 2.0)
    end = time.monotonic() + Heartbeat().silence_s + 3
    while time.monotonic() < end:
        with suppress(StorageUnavailable):
            assert watch.look() is not None, "the lease has expired"
        time.sleep(0.1)
    assert store.refused > asked + 1, "no request went without an answer"
    assert watch.alive and not lost
    lease.end()


CLAIMS: dict[str, Callable[[CheckpointDirectory, OccupiedSlots], object]] = {
    "take a lease": lambda home, occupation: Lease.take(home, HOLDER, lambda: False, lambda why: None),
    "take a trial": lambda home, occupation: occupation.take(1, 0, lambda: False, lambda why: None),
    "look at a trial": lambda home, occupation: occupation.look(2),
    "look at a lease": lambda home, occupation: LeaseObserver(home).look(),
}


@pytest.mark.prove
@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(claim, id=name, marks=[] if number == 0 else pytest.mark.prove)
        for number, (name, claim) in enumerate(CLAIMS.items())
    ],
)
def test_a_claim_ends_within_half_of_the_timeout(
    claim: Callable[[CheckpointDirectory, OccupiedSlots], object],
    home: CheckpointDirectory,
    store: FaultyS3,
    tmp_path: Path,
) -> None:
    occupation = OccupiedSlots(SweepStore(f"s3://bucket/{tmp_path.name}/sweep", ()), HOLDER)
    silence(store, 60)
    asked, started = store.refused, time.monotonic()
    with pytest.raises(StorageUnavailable, match="within 3 s"):
        claim(home, occupation)
    assert time.monotonic() - started < 5 and store.refused >= asked + 2


@pytest.mark.prove
def test_an_announcement_is_repeated_while_others_do_not_apply_a_short_timeout(
    home: CheckpointDirectory, store: FaultyS3
) -> None:
    lease = Lease.take(home, HOLDER, lambda: False, lambda why: None)
    silence(store, 2.5)  # longer than one heartbeat is tried
    lease.announce(CheckpointName(lease.attempt, 10))
    sign = last_heartbeat(home, lease.attempt)
    assert sign is not None and sign.announced == str(CheckpointName(lease.attempt, 10))
    lease.end()
