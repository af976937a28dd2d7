"""Stores that ignore conditional writes: work that needs exactly one writer is refused."""

from pathlib import Path

import pytest

from slipstream.operations.doctor import node
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.sweep.records import TrialProposed
from slipstream.pipeline.sweep.store import SweepStore
from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.storage import (
    AlreadyThere,
    MissingObject,
    ObjectInfo,
    StorageUnavailable,
    conditional,
    object_store,
    s3,
    storage_for,
)
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import Remote
from tests.support.wording import refuses, same_wording


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a process that has created nothing yet."""
    monkeypatch.setattr(conditional, "HONOURING", set())


def conditional_writes(proxy: FaultyS3, write: str) -> int:
    """The writes since the last call."""
    count = sum(line.startswith(write) for line in proxy.requests)
    proxy.requests.clear()
    return count


def test_the_first_object_of_a_process_is_sent_twice(remote: Remote, tmp_path: Path) -> None:
    remote.storage.create("first", b"mine")
    assert conditional_writes(remote.proxy, remote.write) == 2
    remote.storage.create("second", b"mine")
    assert conditional_writes(remote.proxy, remote.write) == 1
    for key in ("first", "second"):
        with pytest.raises(AlreadyThere):
            remote.storage.create(key, b"another's")
        assert remote.storage.get(key, tmp_path / "down").read_bytes() == b"mine"


def test_a_store_that_has_refused_a_write_is_not_asked_again(remote: Remote) -> None:
    remote.storage.put("there", b"another's")
    with pytest.raises(AlreadyThere):
        remote.storage.create("there", b"mine")
    conditional_writes(remote.proxy, remote.write)
    remote.storage.create("fresh", b"mine")
    assert conditional_writes(remote.proxy, remote.write) == 1


def test_a_store_that_ignores_the_condition_is_refused_in_one_line(remote: Remote) -> None:
    remote.proxy.ignores_conditions = True
    for key in ("first", "second"):
        with refuses(UserError) as refused:
            remote.storage.create(key, b"mine")
        assert "\n" not in refused.value.message
    assert len(remote.proxy.fired) == 4 and "ignored the condition of" in remote.proxy.fired[0][1]
    assert remote.storage.list() == [], "what was refused is not there"
    remote.storage.create("needs no condition", b"mine", exactly_one=False)
    remote.storage.put("needs none either", b"mine")


def test_a_refusal_does_not_depend_on_lost_answers(remote: Remote) -> None:
    remote.proxy.ignores_conditions = True
    remote.proxy.inject(remote.write, "lost", "pass", "503")
    with refuses(UserError):
        remote.storage.create("first", b"mine")
    remote.proxy.ignores_conditions = False
    remote.proxy.inject(remote.write, "lost", "503")
    remote.storage.create("first", b"mine")
    assert not remote.proxy.plan


WORK = {
    "an attempt": lambda uri, n: CheckpointDirectory(storage_for(uri)).claim_exactly(1, Holder(f"f{n}", 0)),
    "a promotion": lambda uri, n: Registry(uri).point(1, f"{n}" * 16, f"{n}" * 64, "better"),
    "a trial": lambda uri, n: SweepStore(uri, ()).propose(lambda trials: TrialProposed({})),
}


@pytest.mark.parametrize("work", WORK)
def test_two_runs_do_not_take_one_number(work: str, store: FaultyS3, tmp_path: Path) -> None:
    """Without the second write both get the number 1, or the second promotion replaces the first."""
    uri = f"s3://bucket/{tmp_path.name}"
    store.ignores_conditions = True
    for number in (1, 2):
        with refuses(UserError):
            WORK[work](uri, number)
    assert len(store.fired) == 4 and storage_for(uri).list() == []
    store.ignores_conditions = False
    assert WORK[work](uri, 1)


def test_the_bytes_are_compared_not_the_size(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is as long replaces the object before it is read back."""

    module = s3 if remote.base.startswith("s3://") else object_store
    stat = module.stat

    def stat_of_another(uri: str) -> ObjectInfo:
        monkeypatch.setattr(module, "stat", stat)
        remote.storage.put("marker", b"another")
        return stat(uri)

    monkeypatch.setattr(module, "stat", stat_of_another)
    with refuses(StorageUnavailable):
        remote.storage.create("marker", b"my own!")


def test_the_doctor_writes_twice(remote: Remote) -> None:
    (good,) = node.conditional_writes(remote.base)
    assert good.what == "conditional writes" and "was refused" in good.found and not good.problem
    remote.proxy.ignores_conditions = True
    (bad,) = node.conditional_writes(remote.base)
    same_wording(bad.found)
    same_wording(bad.problem)
    assert len(remote.proxy.fired) == 2 and remote.storage.list() == []


def test_the_doctor_and_a_directory(tmp_path: Path) -> None:
    (reading,) = node.conditional_writes(str(tmp_path))
    assert "was refused" in reading.found and not reading.problem
    (unread,) = node.conditional_writes("")
    same_wording(unread.found)
    with pytest.raises(MissingObject):
        storage_for(str(tmp_path)).get("doctor", tmp_path)
