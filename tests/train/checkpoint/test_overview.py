"""The list of checkpoint directories, and deletion of abandoned ones."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slipstream.pipeline.train.checkpoint import lease
from slipstream.pipeline.train.checkpoint.command import main
from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory, CheckpointName
from slipstream.pipeline.train.checkpoint.lease import Lease
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.storage import s3, storage_for
from tests.support.faulty_s3 import FaultyS3
from tests.support.small_run import Run
from tests.support.wording import line_with, same_wording

DAY_S = 86400.0


def lost(address: str, holder: Holder, step: int) -> CheckpointDirectory:
    """A home as one leaves it whose machine is lost after ``step``."""
    home = CheckpointDirectory(storage_for(address))
    attempt = home.claim(holder)
    held = Lease(home, attempt, lambda: False, lambda why: None)
    home.inherit(attempt)
    home.storage.put(f"{CheckpointName(attempt, step)}/tensors-00000.bin", bytes(3000))
    home.storage.put(f"{CheckpointName(attempt, step)}/manifest.json", b"{}")
    held._over.set()
    held._thread.join()
    if held._process_lock is not None:
        held._process_lock.release()
    return home


def aged(directory: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    for path in directory.rglob("*"):
        os.utime(path, (then, then))


@pytest.fixture
def short_leases(store: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that expire after 0.9 s, and heartbeats every 0.1 s."""
    monkeypatch.setattr(lease, "PERIOD_S", 0.1)
    monkeypatch.setattr(lease, "GLANCE_S", 0.02)
    # Creating a client may take longer than a request to it may.
    s3.client_of(os.getpid(), is_limited=True)


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


def rows(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.output.splitlines()]


def test_what_there_is(invoke: Callable[..., Result], tmp_path: Path) -> None:
    below = tmp_path / ".slipstream/checkpoints"
    lost(str(below / "aaaa"), Holder("f1", 2), 1200)
    aged(below / "aaaa", 3)
    lost(str(below / "bbbb"), Holder("f2", 0), 70)
    ended = Run(below / "cccc", holder=Holder("f3", 1))
    ended.steps(1)
    ended.save(5)
    ended.checkpoints.end()
    lost(str(below / "dddd"), Holder("f4", 0), 10).finish(Holder("f4", 0), "model", "code")
    working = Run(below / "eeee", holder=Holder("f5", 0))
    working.save(8)
    (below / "a stray file").write_text("")
    header, *found = rows(invoke())
    assert header[0] == "training" and len(found) == 5
    by_name = {row[0]: row for row in found}
    assert by_name["aaaa"][-6:] == ["1200", "lost", "attempt", "2", "of", "f1"] and "3 d ago" in " ".join(
        by_name["aaaa"]
    )
    assert by_name["bbbb"][-6:] == ["70", "lost", "attempt", "0", "of", "f2"], "no process has its lock"
    assert by_name["eeee"][-7:] == ["8", "at", "work", "attempt", "0", "of", "f5"]
    assert by_name["cccc"][-6:] == ["5", "ended", "attempt", "1", "of", "f3"]
    assert by_name["dddd"][-6:] == ["-", "finished", "attempt", "0", "of", "f4"]
    assert found[-1][0] == "aaaa", "the last written come first"


@pytest.mark.usefixtures("short_leases")
def test_only_what_is_old_is_freed_and_it_is_named(invoke: Callable[..., Result], tmp_path: Path) -> None:
    below = tmp_path / ".slipstream/checkpoints"
    for name, days in (("old", 15), ("older", 40), ("young", 13)):
        lost(str(below / name), Holder(f"f-{name}", 0), 100)
        aged(below / name, days)
    assert "2 of 3 checkpoint directories are older than 14 days: --free deletes them" in invoke().output
    assert (below / "old").exists(), "a list frees nothing"
    said = invoke("--free").output
    assert (
        "freed .slipstream/checkpoints/old: " in said
        and "15 d old" in said
        and "freed 2 of 3 checkpoint directories, " in said
    )
    assert "checkpoints/young" not in said
    assert sorted(path.name for path in below.iterdir()) == ["young"]
    assert [row[0] for row in rows(invoke())] == ["training", "young"]


@pytest.mark.usefixtures("short_leases")
def test_the_profile_says_how_old_and_where(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.shared.profiles.profile import current_profile

    place = tmp_path / "elsewhere"
    (tmp_path / "mine.toml").write_text(f'[stages.train]\ncheckpoints = "{place}"\ncheckpoint_days = 2\n')
    monkeypatch.setenv("SLIPSTREAM_PROFILE", str(tmp_path / "mine.toml"))
    current_profile.cache_clear()
    try:
        lost(str(place / "checkpoints/project/development/k"), Holder("f1", 0), 100)
        aged(place, 3)
        assert "project/development/k" in invoke().output
        assert "freed 1 of 1 checkpoint directories" in invoke("--free").output
    finally:
        current_profile.cache_clear()


def test_the_same_in_a_store(invoke: Callable[..., Result], store: FaultyS3) -> None:
    lost("s3://bucket/overview/checkpoints/project/production/key", Holder("f1", 1), 300)
    (_, row) = rows(invoke("s3://bucket/overview/"))
    assert row[0] == "project/production/key" and row[-7:] == ["300", "at", "work", "attempt", "1", "of", "f1"]
    assert "freed 0 of 1 checkpoint directories, 0 B" in invoke("s3://bucket/overview", "--free").output


@pytest.mark.prove
@pytest.mark.usefixtures("short_leases")
def test_a_clock_that_is_ahead_frees_nothing(
    invoke: Callable[..., Result], tmp_path: Path, store: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age is by the store's clock. This machine's deleted the directory of a living process."""
    below = tmp_path / ".slipstream/checkpoints"
    working = Run(below / "held", holder=Holder("f1", 0))
    working.save(8)
    lost("s3://bucket/ahead/checkpoints/project/production/key", Holder("f2", 0), 300)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 15 * DAY_S)
    store.clock_ahead_s = -15 * DAY_S  # it runs in this process
    for where, row_end in ((), "f1"), (("s3://bucket/ahead",), "f2"):
        _, row, freed = rows(invoke(*where, "--free"))
        assert row[-1] == row_end and " ".join(freed) == "freed 0 of 1 checkpoint directories, 0 B"
        assert " d ago" not in " ".join(row)
    working.checkpoints.end()
    assert CheckpointDirectory(storage_for(str(below / "held"))).checkpoints()


@pytest.mark.prove
@pytest.mark.usefixtures("short_leases")
def test_what_a_process_holds_is_kept_however_old_it_looks(invoke: Callable[..., Result], tmp_path: Path) -> None:
    """As after the clock of a disk was set ahead."""
    below = tmp_path / ".slipstream/checkpoints"
    for name in ("held", "lost"):
        lost(str(below / name), Holder(f"f-{name}", 0), 100)
    lock = lease.process_lock(storage_for(str(below / "held")))
    assert lock is not None
    aged(below, 15)
    said = invoke("--free").output
    assert "waiting 1 s (the timeout of a lease)" in said
    same_wording(line_with("slipstream/checkpoints/held", said))
    assert "freed .slipstream/checkpoints/lost: " in said and "freed 1 of 2 " in said
    assert [path.name for path in below.iterdir()] == ["held"] and (below / "held/claims/0001").exists()
    lock.release()
    aged(below, 15)
    assert "freed 1 of 1 checkpoint directories, " in invoke("--free").output


@pytest.mark.prove
@pytest.mark.usefixtures("short_leases")
def test_what_changes_while_it_waits_is_kept(invoke: Callable[..., Result], store: FaultyS3) -> None:
    """A heartbeat shows a living holder, whatever the clock of the store says."""
    base = "s3://bucket/changing/checkpoints/project/production"
    for name in ("held", "lost"):
        lost(f"{base}/{name}", Holder(f"f-{name}", 0), 100)
    held = Lease(CheckpointDirectory(storage_for(f"{base}/held")), 1)
    store.clock_ahead_s = 15 * DAY_S
    said = invoke("s3://bucket/changing", "--free").output
    held.end()
    assert f"kept {base}/held: it was written to in the meantime, so it is in use" in said
    assert f"freed {base}/lost: " in said and "15 d old" in said and "freed 1 of 2 checkpoint directories, " in said
    keys = storage_for("s3://bucket/changing/checkpoints").list()
    assert {key.split("/")[2] for key in keys} == {"held"} and "project/production/held/claims/0001" in keys


def test_nothing_there_is_no_error_and_an_absent_bucket_is_one_line(
    invoke: Callable[..., Result], store: FaultyS3
) -> None:
    nothing = invoke()
    assert nothing.exit_code == 0
    same_wording(nothing.output)
    absent = invoke("s3://absent/prefix")
    assert absent.exit_code == 1
    same_wording(absent.output)
    assert len(absent.output.strip().splitlines()) == 1
