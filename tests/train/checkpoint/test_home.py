"""Checkpoint directories: their holder, and the checkpoints that count."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.flyte.homes import raw_output_base
from slipstream.pipeline.train.checkpoint import home as home_module
from slipstream.pipeline.train.checkpoint import lease as leases
from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory, CheckpointName, Superseded
from slipstream.pipeline.train.checkpoint.lease import Heartbeat, Lease, wait_for_announced, wait_for_others
from slipstream.pipeline.train.checkpoint.unfinished import UnfinishedTraining, finished_result
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.artifacts.workspaces import Holder, home_below
from slipstream.shared.errors import UserError
from slipstream.shared.storage import Replaced, storage_for
from tests.support.faulty_s3 import FaultyS3
from tests.support.small_run import Run, names, same
from tests.support.wording import refuses, same_wording

FIRST, RETRY = Holder("f1", 0, "s3://b/raw/aa/f1-n0-0"), Holder("f1", 1, "s3://b/raw/zz/f1-n0-1")
OTHER = Holder("f2", 0, "s3://b/raw/mm/f2-n0-0")


@pytest.fixture
def home(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(storage_for(str(tmp_path / "home")))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set heartbeats to 0.1 s, so that a lease expires in less than a second."""
    monkeypatch.setattr(leases, "PERIOD_S", 0.1)
    monkeypatch.setattr(leases, "HASTE_S", 0.1)
    monkeypatch.setattr(leases, "GLANCE_S", 0.01)
    monkeypatch.setattr(leases, "POLL_S", 0.02)
    monkeypatch.setattr(leases, "POLL_IN_HASTE_S", 0.02)


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a store, where no lock tells that a process has gone."""
    monkeypatch.setattr(leases, "process_lock", lambda storage: None)


def hold(home: CheckpointDirectory, holder: Holder) -> tuple[int, Lease]:
    attempt = home.claim(holder)
    return attempt, Lease(home, attempt, lambda: False, lambda why: None)


def put_checkpoint(home: CheckpointDirectory, name: CheckpointName) -> None:
    home.storage.put(f"{name}/tensors-00000.bin", b"bytes")
    home.storage.put(f"{name}/manifest.json", b"{}")


def test_the_address_is_the_same_whatever_shard_and_attempt() -> None:
    prefixes = ["s3://bucket/data/kt/f5c8-n0-0", "s3://bucket/data/a9/f5c8-n0-3/", "s3://bucket/data/zz/fother-n0-0"]
    homes = {home_below(raw_output_base(prefix), "key", "project", "development") for prefix in prefixes}
    assert homes == {"s3://bucket/data/checkpoints/project/development/key"}
    assert raw_output_base("s3://bucket/kt/f5c8-n0-0") == "s3://bucket"


def test_who_is_known_to_be_over() -> None:
    assert RETRY.succeeds(FIRST) and FIRST.succeeds(FIRST) and not FIRST.succeeds(RETRY)
    assert not OTHER.succeeds(FIRST) and not RETRY.succeeds(OTHER)
    # Two nodes of one execution that train the same; and runs without a name.
    assert not Holder("f1", 0, "s3://b/raw/qq/f1-n1-0").succeeds(FIRST)
    assert not Holder().succeeds(Holder())


def test_of_many_that_claim_at_once_each_gets_a_number_of_its_own(home: CheckpointDirectory) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(home.claim(OTHER))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 13))


def test_what_is_completed_after_the_successor_has_looked_never_counts(home: CheckpointDirectory) -> None:
    old = home.claim(FIRST)
    put_checkpoint(home, CheckpointName(old, 100))
    new = home.claim(RETRY)
    assert home.inherit(new) == [CheckpointName(old, 100)]
    put_checkpoint(home, CheckpointName(old, 200))  # a zombie's
    assert home.checkpoints() == [CheckpointName(old, 100)]
    put_checkpoint(home, CheckpointName(new, 150))
    assert home.checkpoints() == [CheckpointName(new, 150), CheckpointName(old, 100)]
    third = home.claim(OTHER)
    assert home.inherit(third) == [CheckpointName(new, 150), CheckpointName(old, 100)]
    assert names(Path(home.storage.base)) == ["step-000000000100.a0001", "step-000000000150.a0002"]
    put_checkpoint(home, CheckpointName(old, 300))
    put_checkpoint(home, CheckpointName(new, 300))
    assert home.checkpoints() == [CheckpointName(new, 150), CheckpointName(old, 100)]


def test_one_that_has_claimed_and_died_before_it_looked_changes_nothing(home: CheckpointDirectory) -> None:
    put_checkpoint(home, CheckpointName(home.claim(FIRST), 100))
    home.claim(RETRY)
    third = home.claim(OTHER)
    assert home.inherit(third) == [CheckpointName(1, 100)] == home.checkpoints()


def test_a_save_is_finished_if_it_was_announced_before_the_claim_and_not_begun_after_it(
    home: CheckpointDirectory,
) -> None:
    old, lease = hold(home, FIRST)
    lease.announce(CheckpointName(old, 100))
    new = home.claim(RETRY)
    put_checkpoint(home, CheckpointName(old, 100))
    with refuses(Superseded):
        lease.announce(CheckpointName(old, 200))
    assert home.inherit(new) == [CheckpointName(old, 100)]
    lease.end()


def test_the_successor_waits_for_what_is_announced(home: CheckpointDirectory, quick: None) -> None:
    old, lease = hold(home, FIRST)
    lease.announce(CheckpointName(old, 100))
    new = home.claim(RETRY)
    finish = threading.Timer(0.4, put_checkpoint, (home, CheckpointName(old, 100)))
    finish.start()
    started = time.monotonic()
    wait_for_announced(home, new, 10)
    assert 0.3 < time.monotonic() - started < 5
    assert home.inherit(new) == [CheckpointName(old, 100)]
    lease.end()


def test_the_successor_waits_for_one_that_has_a_notice_until_it_has_ended(
    home: CheckpointDirectory, quick: None
) -> None:
    told = threading.Event()
    old = home.claim(FIRST)
    lease = Lease(home, old, told.is_set, lambda why: None)
    new = home.claim(RETRY)
    wait_for_announced(home, new, 10)  # nothing is announced: no wait
    (Path(home.storage.base) / "claims/0002").unlink()
    told.set()
    time.sleep(0.2)
    new = home.claim(RETRY)

    def save_and_end() -> None:
        lease.announce(CheckpointName(old, 70))  # its last save begins after the claim
        put_checkpoint(home, CheckpointName(old, 70))
        lease.end()

    threading.Timer(0.4, save_and_end).start()
    started = time.monotonic()
    wait_for_announced(home, new, 10)
    assert 0.2 < time.monotonic() - started < 5
    assert home.inherit(new) == [CheckpointName(old, 70)]
    with pytest.raises(Superseded):
        lease.announce(CheckpointName(old, 90))


def test_it_waits_no_longer_than_the_grace_and_than_there_is_life(home: CheckpointDirectory, quick: None) -> None:
    old, lease = hold(home, FIRST)
    lease.announce(CheckpointName(old, 100))
    new = home.claim(RETRY)
    started = time.monotonic()
    wait_for_announced(home, new, 0.3)
    assert 0.2 < time.monotonic() - started < 2
    lease._over.set()  # killed: no more heartbeats, and no exit record
    started = time.monotonic()
    wait_for_announced(home, new, 60)
    assert time.monotonic() - started < 5
    assert home.inherit(new) == []


def test_another_execution_waits_until_the_holder_has_ended(
    home: CheckpointDirectory, quick: None, unlocked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, lease = hold(home, FIRST)
    threading.Timer(0.8, lease.end).start()
    started = time.monotonic()
    assert wait_for_others(home.storage.base, OTHER, "wait")
    assert time.monotonic() - started > 0.7
    (line,) = capsys.readouterr().err.splitlines()
    same_wording(line)


def test_or_until_it_shows_no_sign_of_life(home: CheckpointDirectory, quick: None, unlocked: None) -> None:
    _, lease = hold(home, FIRST)
    lease._over.set()  # killed
    started = time.monotonic()
    assert wait_for_others(home.storage.base, OTHER, "wait")
    assert 0.3 < time.monotonic() - started < 5


def test_or_refuses_in_one_line_but_never_one_that_is_gone(
    home: CheckpointDirectory, quick: None, unlocked: None
) -> None:
    attempt, lease = hold(home, FIRST)
    lease.saved(CheckpointName(attempt, 40))
    with refuses(UserError):
        wait_for_others(home.storage.base, OTHER, "refuse")
    lease._over.set()
    assert wait_for_others(home.storage.base, OTHER, "refuse")


def test_on_a_disk_a_lock_tells_at_once_that_a_process_has_gone(home: CheckpointDirectory) -> None:
    _, lease = hold(home, FIRST)
    assert lease.alone
    lease._over.set()
    assert lease._process_lock is not None
    lease._process_lock.release()  # as the system does when the process ends
    started = time.monotonic()
    assert not wait_for_others(home.storage.base, OTHER, "wait")
    assert time.monotonic() - started < 1


def test_nobody_sees_a_claim_without_its_lock(home: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, seen = CheckpointDirectory.claim, list[bool]()

    def then_look(self: CheckpointDirectory, holder: Holder) -> int:
        attempt = claim(self, holder)
        seen.append(leases.is_unlocked(self.storage))
        return attempt

    monkeypatch.setattr(CheckpointDirectory, "claim", then_look)
    Lease.take(home, FIRST, lambda: False, lambda why: None)
    assert seen == [False]


def test_the_retry_waits_for_nobody_and_a_home_that_is_new_for_nothing(
    home: CheckpointDirectory, unlocked: None
) -> None:
    assert not wait_for_others(home.storage.base, OTHER, "wait")
    hold(home, FIRST)
    assert not wait_for_others(home.storage.base, RETRY, "wait")


def test_nobody_is_waited_for_in_a_home_whose_training_is_finished(
    home: CheckpointDirectory, quick: None, unlocked: None
) -> None:
    _, lease = hold(home, FIRST)
    lease.end()
    home.finish(FIRST, "model", "code")
    home.storage.delete(["leases/0001.json"])
    started = time.monotonic()
    assert not wait_for_others(home.storage.base, OTHER, "wait")
    assert time.monotonic() - started < 0.3


def test_what_is_finished_but_not_yet_delivered_is_waited_for_and_taken(
    home: CheckpointDirectory, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the end of the workers and the upload of their result the agent keeps the lease, from another process."""
    attempt, workers = hold(home, FIRST)
    put_checkpoint(home, CheckpointName(attempt, 10))
    workers.hand_over()
    waited: list[bool] = []
    other = threading.Thread(target=lambda: waited.append(wait_for_others(home.storage.base, OTHER, "wait")))
    other.start()
    time.sleep(0.3)  # no process has the lock
    inputs = {"training": TrainingConfig()}
    delivered = UnfinishedTraining().deliver(home.storage.base, FIRST, inputs)
    time.sleep(1.0)  # longer than the timeout of a lease
    assert not waited
    delivered("model")
    other.join(5)
    assert waited == [True]
    assert home.storage.list() == ["claims/0001", "finished.json"]
    found = finished_result(home.storage.base, OTHER, waited=True)
    assert found is not None and found.artifact == "model"


def test_what_somebody_else_works_in_is_not_swept(home: CheckpointDirectory) -> None:
    attempt, workers = hold(home, FIRST)
    put_checkpoint(home, CheckpointName(attempt, 10))
    workers.hand_over()
    delivered = UnfinishedTraining().deliver(home.storage.base, FIRST, {"training": TrainingConfig()})
    home.inherit(home.claim(OTHER))
    delivered("model")
    assert home.checkpoints() == [CheckpointName(attempt, 10)] and home.finished() is None


def test_a_home_of_the_users_own_is_left_as_it_is(home: CheckpointDirectory) -> None:
    attempt, workers = hold(home, FIRST)
    put_checkpoint(home, CheckpointName(attempt, 10))
    workers.hand_over()
    inputs = {"training": TrainingConfig(checkpoint_uri=home.storage.base)}
    UnfinishedTraining().deliver(home.storage.base, FIRST, inputs)("model")
    assert home.checkpoints() == [CheckpointName(attempt, 10)] and home.finished() is None
    assert not wait_for_others(home.storage.base, OTHER, "refuse")


def test_a_holder_learns_that_it_has_lost_its_home(home: CheckpointDirectory, quick: None) -> None:
    lost: list[str] = []
    attempt = home.claim(FIRST)
    Lease(home, attempt, lambda: False, lost.append)
    home.claim(OTHER)
    end = time.monotonic() + 5
    while not lost:
        assert time.monotonic() < end
        time.sleep(0.01)
    same_wording(lost[0])
    sign = (Path(home.storage.base) / "leases/0001.json").read_bytes()
    time.sleep(0.3)
    assert (Path(home.storage.base) / "leases/0001.json").read_bytes() == sign, "it still writes"
    assert len(lost) == 1


def test_what_is_finished_is_swept_and_a_late_write_does_not_count(home: CheckpointDirectory) -> None:
    zombie = home.claim(FIRST)
    put_checkpoint(home, CheckpointName(zombie, 10))
    attempt, lease = hold(home, RETRY)
    home.inherit(attempt)
    for step in (20, 30):
        put_checkpoint(home, CheckpointName(attempt, step))
    home.storage.put("ledger/0002.json", b"{}")
    lease.end()
    home.finish(RETRY, "s3://bucket/raw/zz/f1-n0-1/model", "code")
    assert home.storage.list() == ["claims/0002", "finished.json", "inherited/0002.json"]
    put_checkpoint(home, CheckpointName(zombie, 99))
    with pytest.raises(Superseded):
        home.check_claim(zombie)
    finished = home.finished()
    assert finished is not None and (finished.holder, finished.artifact) == (RETRY, "s3://bucket/raw/zz/f1-n0-1/model")
    home.reopen()
    new = home.claim(OTHER)
    assert new == 3 and home.inherit(new) == []


def test_who_may_take_the_result_of_a_finished_training(
    home: CheckpointDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    home.claim(FIRST)
    address = home.storage.base
    assert finished_result(address, FIRST, waited=False) is None
    home.finish(FIRST, "model", code_version("train"))
    assert finished_result(address, RETRY, waited=False) is not None, "Flyte did not learn of the result"
    assert finished_result(address, OTHER, waited=True) is not None, "it finished while the other one waited"
    assert finished_result(address, OTHER, waited=False) is None, "the cache is to be overwritten"
    same_wording(capsys.readouterr().err)
    assert home.finished() is None and home.claim(OTHER) == 2


@pytest.mark.parametrize(("holder", "waited"), [(RETRY, False), (OTHER, True)])
def test_the_result_of_other_code_is_never_taken(
    home: CheckpointDirectory, capsys: pytest.CaptureFixture[str], holder: Holder, waited: bool
) -> None:
    home.claim(FIRST)
    home.finish(FIRST, "model", "another code version")
    assert finished_result(home.storage.base, holder, waited=waited) is None
    assert home.finished() is None
    same_wording(capsys.readouterr().err)


def test_a_zombie_that_goes_on_saving_is_stopped_and_its_save_is_not_restored(tmp_path: Path) -> None:
    zombie = Run(tmp_path, holder=FIRST)
    zombie.steps(2)
    zombie.save(2)
    kept = {name: tensor.clone() for name, tensor in zombie.everything().items()}
    zombie.steps(1)
    # Its files are written, and its manifest would be next.
    written = zombie.checkpoints._publisher.store
    successor: list[Run] = []

    def then_be_overtaken(*arguments: object) -> object:
        files = written(*arguments)  # type: ignore[arg-type]
        successor.append(Run(tmp_path, holder=OTHER, grace_s=0.0))
        return files

    zombie.checkpoints._publisher.store = then_be_overtaken  # type: ignore[method-assign,assignment]
    with pytest.raises(Superseded):
        zombie.save(3)
    restored = successor[0].checkpoints.restore()
    assert restored is not None and restored.step == 2
    assert same(successor[0].everything(), kept)
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 2
    with pytest.raises(Superseded):
        zombie.save(4)
    assert not list(tmp_path.glob("step-*4.a0001")), "it wrote after its successor had restored"


def test_a_record_that_may_not_be_read_is_not_absent(store: FaultyS3, tmp_path: Path) -> None:
    """Taken for absent, an attempt would inherit nothing and delete what is there."""
    home = CheckpointDirectory(storage_for(f"s3://bucket/{tmp_path.name}"))
    for attempt, name in ((1, CheckpointName(1, 10)), (2, CheckpointName(2, 20))):
        home.claim(Holder("execution", attempt))
        for file in ("tensors-00000.bin", "manifest.json"):
            home.storage.put(f"{name}/{file}", b"{}")
        home.inherit(attempt)
    home.claim(Holder("execution", 3))
    store.inject("GET", "pass", "pass", "403")
    with refuses(UserError):
        home.inherit(3)
    store.plan.clear()
    assert home.checkpoints() == [CheckpointName(2, 20), CheckpointName(1, 10)]


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, times = CheckpointDirectory(storage_for(str(tmp_path))), iter(range(100))
    home.storage.put("leases/0001.json", b'{"beat": 1}')
    right = home_module.open_reader

    def open_reader(uri: str) -> Any:
        if next(times) < replaced:
            raise Replaced("was replaced")
        return right(uri)

    monkeypatch.setattr(home_module, "open_reader", open_reader)
    replaced = 3
    assert home.read("leases/0001.json", Heartbeat) == Heartbeat(1)
    replaced = 50
    with pytest.raises(Replaced):
        home.read("leases/0001.json", Heartbeat)
