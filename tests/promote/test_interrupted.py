"""Concurrent, killed and full-disk promotions: one whole model is in service."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from slipstream.pipeline.export.package import copies
from slipstream.pipeline.promote.comparison import evaluate_promotion, promote_package
from slipstream.pipeline.promote.store import Registry, package_version
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.scoring import Promotion, PromotionDecision
from slipstream.shared.errors import UserError
from slipstream.shared.storage.local import LocalStorage
from tests.support.promotions import LENIENT, Models, in_service, put
from tests.support.wording import refuses, same_wording


@pytest.mark.prove
@pytest.mark.parametrize("registry", ["directory", "s3"], indirect=True)
def test_two_runs_that_promote_at_once_leave_one_whole_winner(
    models: Models, registry: Registry, tmp_path: Path
) -> None:
    """The other run promotes between this one's judgement and its pointer; this one is then judged against it."""
    data, first, second = models.data, models.trained(150), models.trained(200)
    stale = evaluate_promotion(second, registry, data, LENIENT)
    assert stale == PromotionDecision(True, 1, "it is the first in this registry")
    assert put(first, registry, data).promoted
    late = promote_package(second, registry, data, LENIENT, stale)
    assert late.promoted and f"against version {package_version(first)}" in late.why
    assert [pointer.version for pointer in registry.history()] == [package_version(first), package_version(second)]
    lost = promote_package(models.trained(1), registry, data, LENIENT, stale)
    assert not lost.promoted and "more than the 8 allowed" in lost.why
    assert in_service(registry, tmp_path / "served") == package_version(second)


def race(model: Path, data: Path, uri: str, barrier: Any) -> None:
    prepared, registry = PreparedData.open(data), Registry(uri)
    verdict = evaluate_promotion(model, registry, prepared, LENIENT)
    barrier.wait()
    promote_package(model, registry, prepared, LENIENT, verdict)


@pytest.mark.prove
def test_processes_that_race_for_the_first_promotion(models: Models, tmp_path: Path) -> None:
    """Both were judged as the first: one is, and the other is judged against it."""
    uri, context = str(tmp_path / "registry"), multiprocessing.get_context("spawn")
    barrier, data = context.Barrier(2), models.data.artifact.directory
    pair = [models.trained(150), models.trained(200)]
    processes = [context.Process(target=race, args=(model, data, uri, barrier)) for model in pair]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    found = Registry(uri).history()
    assert [pointer.number for pointer in found] == [1, 2]
    assert {pointer.version for pointer in found} == {package_version(model) for model in pair}
    assert found[0].version in found[1].why
    same_wording(found[0].why)
    in_service(Registry(uri), tmp_path / "served")


def killed_at(number: int, model: Path, data: Path, uri: str, *, after: bool = False) -> None:
    """Promote, and be killed when the ``number``-th file is to be put, or ``after`` it was."""
    right, count = LocalStorage._place, iter(range(10_000))

    def place_or_die(self: LocalStorage, *arguments: Any, **named: Any) -> None:
        here = next(count) == number
        if here and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        right(self, *arguments, **named)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(LocalStorage, "_place", place_or_die):
        put(model, Registry(uri), PreparedData.open(data))


def test_a_run_that_is_killed_anywhere_leaves_the_old_one_whole(models: Models, tmp_path: Path) -> None:
    """At the first file, in between, at the manifest and at the pointer; the next run promotes as if nothing was."""
    first, second = models.trained(150), models.trained(200)
    files = sum(1 for path in second.rglob("*") if path.is_file())
    for number in (0, files // 2, files - 1, files):
        uri = str(tmp_path / f"registry-{number}")
        put(first, Registry(uri), models.data)
        where = (number, second, models.data.artifact.directory, uri)
        process = multiprocessing.get_context("fork").Process(target=killed_at, args=where)
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        assert in_service(Registry(uri), tmp_path / "served") == package_version(first)
        assert put(second, Registry(uri), models.data).promoted
        assert not [path for path in Path(uri, ".scratch").iterdir() if path.is_dir()], "a copy is left"
        assert in_service(Registry(uri), tmp_path / "served") == package_version(second)


def test_a_run_that_is_killed_after_its_pointer_says_when_it_is_retried_that_it_is_in_service(
    models: Models, tmp_path: Path
) -> None:
    """The platform repeats the last task alone, with the verdict of the attempt that was killed."""
    registry, second = Registry(str(tmp_path / "registry")), models.trained(200)
    put(models.trained(150), registry, models.data)
    verdict = evaluate_promotion(second, registry, models.data, LENIENT)
    files = sum(1 for path in second.rglob("*") if path.is_file())
    where = (files, second, models.data.artifact.directory, registry.uri)
    process = multiprocessing.get_context("fork").Process(target=killed_at, args=where, kwargs={"after": True})
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    retried = promote_package(second, registry, models.data, LENIENT, verdict)
    assert retried == Promotion(True, registry.uri, package_version(second), verdict.why)
    assert [pointer.version for pointer in registry.history()] == [
        package_version(models.trained(150)),
        package_version(second),
    ]


def full(*_: object, **named: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "number", [0, 5, -2, -1, *(pytest.param(n, marks=pytest.mark.prove) for n in (1, 2, 3, 4, 6, 7, 8, 9, -3))]
)
def test_a_disk_that_is_full_at_any_file_leaves_the_old_one_whole(
    number: int, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pointer is the last of them; with room the next run promotes as if nothing was."""
    first, second = models.trained(150), models.trained(200)
    registry = Registry(str(tmp_path / "registry"))
    put(first, registry, models.data)
    # Each file is synced, moved into place, and so is what holds it.
    files = 2 * sum(1 for path in second.rglob("*") if path.is_file()) + 1
    right, count = os.fsync, iter(range(10_000))

    def fsync(descriptor: int) -> None:
        # Threads of other tests may still save something.
        here = Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(registry.uri)
        if here and next(count) == number % files:
            full()
        right(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(UserError, match="/registry: "):
            put(second, registry, models.data)
    assert in_service(registry, tmp_path / "served") == package_version(first)
    assert put(second, registry, models.data).promoted
    assert in_service(registry, tmp_path / "served") == package_version(second)


def test_a_disk_without_room_for_a_copy_is_said_in_one_line(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(str(tmp_path / "registry"))
    with monkeypatch.context() as patched:
        patched.setattr(copies, "copy_untrusted", full)
        with refuses(UserError, match=r"registry/\.scratch:") as said:
            registry.add(models.trained(150))
    assert len(said.value.message) < 300
    assert list((tmp_path / "registry" / ".scratch").iterdir()) == [] == registry.storage.list()
