"""Promotion: what is in service changes for a model that is shown to be as good, and is whole whatever happens."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.results.export import Holdout
from slipstream.artifacts.results.promotion import Promotion, PromotionDecision
from slipstream.errors import UserError
from slipstream.export.check import check
from slipstream.prepare.config import SplitConfig
from slipstream.promote.comparison import Incomparable, check_unseen
from slipstream.promote.config import PromotionConfig
from slipstream.promote.engine import judge, promote
from slipstream.promote.store import Registry, main, version_of
from slipstream.storage.local import LocalStorage
from tests.support.faulty_s3 import FaultyS3
from tests.support.packages import package
from tests.support.raw_tables import mixed_table
from tests.support.toys import images

#: So many points that the 200 test rows can show a loss below.
LENIENT = PromotionConfig(max_loss=8.0)


class Models:
    """Exported models of one table, by how long they were trained; made when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = PreparedData.open(mixed_table(directory / "data", "classification"))

    def trained(self, steps: int) -> Path:
        place = self.directory / f"model-{steps}"
        return place if place.exists() else package(place, self.data, steps)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["directory", "s3"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Registry:
    if request.param == "directory":
        return Registry(str(tmp_path / "registry"))
    request.getfixturevalue("store")
    return Registry(f"s3://bucket/{tmp_path.name}/models")


def put(model: Path, registry: Registry, data: PreparedData, config: PromotionConfig = LENIENT) -> Promotion:
    """What the workflow does: judge, and promote what has passed."""
    verdict = judge(model, registry, data, config)
    if not verdict.passed:
        return Promotion(False, registry.uri, "", verdict.why)
    return promote(model, registry, data, config, verdict)


def in_service(registry: Registry, directory: Path) -> str:
    """The version in service, fetched and checked as a server would."""
    pointer = registry.promoted()
    assert pointer is not None
    shutil.rmtree(directory, ignore_errors=True)
    check(registry.fetch(pointer, directory))
    return pointer.version


def test_one_after_the_other(models: Models, registry: Registry, tmp_path: Path) -> None:
    assert registry.promoted() is None
    first = put(models.trained(150), registry, models.data)
    assert (first.promoted, first.why) == (True, "it is the first in this registry")
    again = put(models.trained(150), registry, models.data)
    assert (again.promoted, again.why) == (False, f"it is version {first.version}, which is in service already")
    worse = put(models.trained(1), registry, models.data)
    assert not worse.promoted and "points of accuracy on" in worse.why and "more than the 8 allowed" in worse.why
    assert in_service(registry, tmp_path / "served") == first.version
    better = put(models.trained(200), registry, models.data)
    assert better.promoted and f"against version {first.version}" in better.why
    assert in_service(registry, tmp_path / "served") == better.version == version_of(models.trained(200))
    assert [pointer.version for pointer in registry.history()] == [first.version, better.version]


def test_too_few_rows_keep_what_is_there_or_not(models: Models, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    put(models.trained(150), registry, models.data)
    strict = judge(models.trained(200), registry, models.data, PromotionConfig(max_loss=0.1))
    assert not strict.passed and "can't tell with" in strict.why
    bold = PromotionConfig(max_loss=0.1, when_in_doubt="take")
    taken = judge(models.trained(200), registry, models.data, bold)
    assert taken.passed and "taken all the same: promotion.when_in_doubt" in taken.why


def test_regressions_are_compared_by_their_rmse(tmp_path: Path) -> None:
    data = PreparedData.open(mixed_table(tmp_path / "data", "regression"))
    registry = Registry(str(tmp_path / "registry"))
    usual, overfitted = (package(tmp_path / str(steps), data, steps) for steps in (5, 150))
    assert put(usual, registry, data).promoted
    worse = put(overfitted, registry, data, PromotionConfig(max_loss=0.0))
    assert not worse.promoted and "% of RMSE on" in worse.why and "more than the 0 allowed" in worse.why
    assert put(overfitted, registry, data, PromotionConfig(max_loss=60.0)).promoted


# Two at once, and one that is killed


def test_two_runs_that_promote_at_once_leave_one_whole_winner(
    models: Models, registry: Registry, tmp_path: Path
) -> None:
    """The other run promotes between this one's judgement and its pointer; this one is then judged against it."""
    data, first, second = models.data, models.trained(150), models.trained(200)
    stale = judge(second, registry, data, LENIENT)
    assert stale == PromotionDecision(True, 1, "it is the first in this registry")
    assert put(first, registry, data).promoted
    late = promote(second, registry, data, LENIENT, stale)
    assert late.promoted and f"against version {version_of(first)}" in late.why
    assert [pointer.version for pointer in registry.history()] == [version_of(first), version_of(second)]
    lost = promote(models.trained(1), registry, data, LENIENT, stale)
    assert not lost.promoted and "more than the 8 allowed" in lost.why
    assert in_service(registry, tmp_path / "served") == version_of(second)


def race(model: Path, data: Path, uri: str, barrier: Any) -> None:
    prepared, registry = PreparedData.open(data), Registry(uri)
    verdict = judge(model, registry, prepared, LENIENT)
    barrier.wait()
    promote(model, registry, prepared, LENIENT, verdict)


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
    assert {pointer.version for pointer in found} == {version_of(model) for model in pair}
    assert "first in this registry" in found[0].why and found[0].version in found[1].why
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

    LocalStorage._place = place_or_die  # type: ignore[method-assign]
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
        assert in_service(Registry(uri), tmp_path / "served") == version_of(first)
        assert put(second, Registry(uri), models.data).promoted
        assert in_service(Registry(uri), tmp_path / "served") == version_of(second)


def test_a_run_that_is_killed_after_its_pointer_says_when_it_is_retried_that_it_is_in_service(
    models: Models, tmp_path: Path
) -> None:
    """The platform repeats the last task alone, with the verdict of the attempt that was killed."""
    registry, second = Registry(str(tmp_path / "registry")), models.trained(200)
    put(models.trained(150), registry, models.data)
    verdict = judge(second, registry, models.data, LENIENT)
    files = sum(1 for path in second.rglob("*") if path.is_file())
    where = (files, second, models.data.artifact.directory, registry.uri)
    process = multiprocessing.get_context("fork").Process(target=killed_at, args=where, kwargs={"after": True})
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    retried = promote(second, registry, models.data, LENIENT, verdict)
    assert retried == Promotion(True, registry.uri, version_of(second), verdict.why)
    assert [pointer.version for pointer in registry.history()] == [version_of(models.trained(150)), version_of(second)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda version: flip(version / "model.onnx"),
        lambda version: (version / "model.onnx").unlink(),
        lambda version: (version / "manifest.json").write_text("{}"),
        lambda version: (version / "stray").write_text("of others"),
    ],
    ids=["changed", "missing", "manifest", "stray"],
)
def test_a_damaged_package_that_lies_there_is_stored_again(
    damage: Callable[[Path], None], models: Models, tmp_path: Path
) -> None:
    """As one that was stored by a run whose verdict came too late, and then damaged."""
    registry, model = Registry(str(tmp_path / "registry")), models.trained(150)
    damage(Path(registry.uri, "versions", registry.add(model)))
    assert put(model, registry, models.data).promoted
    assert in_service(registry, tmp_path / "served") == version_of(model)


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
    files = sum(1 for path in second.rglob("*") if path.is_file()) + 1
    right, count = os.fsync, iter(range(10_000))

    def fsync(descriptor: int) -> None:
        # Threads of other tests may still save something.
        here = Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(registry.uri)
        if here and next(count) == number % files:
            full()
        right(descriptor)

    with monkeypatch.context() as patched:
        # Files are moved into place, and what holds them is synced after each.
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(UserError, match=r"registry: no space left .*; make room or choose another place"):
            put(second, registry, models.data)
    assert in_service(registry, tmp_path / "served") == version_of(first)
    assert put(second, registry, models.data).promoted
    assert in_service(registry, tmp_path / "served") == version_of(second)


def test_a_disk_without_room_for_a_copy_is_said_in_one_line(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(str(tmp_path / "registry"))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        with pytest.raises(UserError, match=r"registry/\.scratch: no space left .*; make room") as said:
            registry.add(models.trained(150))
    assert len(said.value.message) < 300
    assert list((tmp_path / "registry" / ".scratch").iterdir()) == [] == registry.storage.list()


# What cannot be compared


@pytest.fixture
def served(models: Models, tmp_path: Path) -> Registry:
    registry = Registry(str(tmp_path / "registry"))
    put(models.trained(150), registry, models.data)
    return registry


def changed(model: Path, directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model with another signature, sealed as if it had been exported so."""
    shutil.copytree(model, directory)
    path = directory / "signature.json"
    signature = json.loads(path.read_text())
    change(signature)
    path.write_text(json.dumps(signature))
    manifest = json.loads((directory / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["files"]["signature.json"] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    (directory / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    return directory


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.update(target="z"), "the promoted model has the target 'y', this one 'z'"),
        (lambda s: s.update(classes=["maybe", "yes"]), "the class 'maybe' is known to this model only"),
        (lambda s: s["holdout"]["settings"].update(seed=7), r"data\.split\.seed 0, this one with 7: it may have been"),
        (lambda s: s["holdout"].update(by="id"), "held out by content, these by id"),
    ],
)
def test_another_question_or_another_split_is_no_comparison(
    change: Callable[[dict[str, Any]], None], why: str, models: Models, served: Registry, tmp_path: Path
) -> None:
    other = changed(models.trained(200), tmp_path / "other", change)
    verdict = judge(other, served, models.data, LENIENT)
    assert not verdict.passed
    assert verdict.why.startswith("it cannot be compared with version ")
    assert re.search(why, verdict.why), verdict.why


def test_a_package_that_does_not_tell_is_believed(models: Models, served: Registry, tmp_path: Path) -> None:
    other = changed(models.trained(200), tmp_path / "other", lambda s: s.update(holdout=None))
    assert judge(other, served, models.data, LENIENT).passed


def test_the_split_is_the_prepared_datas_own(models: Models, served: Registry, tmp_path: Path) -> None:
    """Prepared for real with another seed, so that its test rows were trained on by the promoted one."""
    data = PreparedData.open(mixed_table(tmp_path / "data", "classification", split=SplitConfig(seed=1)))
    verdict = judge(package(tmp_path / "model", data, 5), served, data, LENIENT)
    assert not verdict.passed and "it may have been trained on these test rows; split the data as then" in verdict.why


def test_a_promoted_model_with_an_input_that_is_gone(models: Models, served: Registry, tmp_path: Path) -> None:
    data = PreparedData.open(mixed_table(tmp_path / "data", "classification", drop=["visits"]))
    model = changed(package(tmp_path / "model", data, 5), tmp_path / "untold", lambda s: s.update(holdout=None))
    verdict = judge(model, served, data, LENIENT)
    assert not verdict.passed and verdict.why.endswith("takes the column 'visits' as integer; here it is no input")


def test_another_preparation_of_the_same_rows(models: Models, served: Registry, tmp_path: Path) -> None:
    """More rows, and so other means and vocabularies: the old one gets the test rows by way of raw columns."""
    data = PreparedData.open(mixed_table(tmp_path / "data", "classification", seed=5, rows=3000))
    verdict = judge(package(tmp_path / "model", data, 150), served, data, LENIENT)
    assert verdict.passed and "on 4" in verdict.why, verdict.why


def by_time(column: str, validation: float, test: float) -> Holdout:
    return Holdout("time", {"column": column}, [validation, test])


def test_later_rows_were_not_trained_on() -> None:
    old = by_time("when", 100.0, 200.0)
    check_unseen(by_time("when", 50.0, 100.0), old)
    with pytest.raises(Incomparable, match="trained on times that test this one; take later test rows"):
        check_unseen(by_time("when", 50.0, 99.0), old)
    with pytest.raises(Incomparable, match=r"data\.time when, this one with day"):
        check_unseen(by_time("day", 300.0, 400.0), old)


def test_images_and_tables_do_not_compare(served: Registry, tmp_path: Path) -> None:
    data = images(tmp_path / "data")
    verdict = judge(package(tmp_path / "model", data, 5), served, data, LENIENT)
    assert not verdict.passed and "the promoted model has the target 'y', this one 'third'" in verdict.why


# Mistakes and damage


def test_a_damaged_model_in_service_is_named(models: Models, served: Registry) -> None:
    pointer = served.promoted()
    assert pointer is not None
    path = Path(served.uri, "versions", pointer.version, "model.onnx")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"version {pointer.version}, is damaged: .*model\.onnx: .* bytes"):
        judge(models.trained(200), served, models.data, LENIENT)


def test_a_directory_that_is_no_model_is_refused(models: Models, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no exported model; expected a directory with a manifest"):
        judge(tmp_path, Registry(str(tmp_path / "registry")), models.data, LENIENT)
    assert not (tmp_path / "registry").exists()


def test_the_same_model_is_in_service_only_if_it_is_whole_there(models: Models, served: Registry) -> None:
    pointer = served.promoted()
    assert pointer is not None
    flip(Path(served.uri, "versions", pointer.version, "model.onnx"))
    with pytest.raises(UserError, match=rf"version {pointer.version}, is damaged: .*model\.onnx: its SHA-256"):
        judge(models.trained(150), served, models.data, LENIENT)


def test_what_others_put_beside_the_promotions_is_none(models: Models, served: Registry) -> None:
    for name in (".DS_Store", "notes.txt", "zz.json", "00000002.json~", "old/00000009.json", "000000003.json"):
        path = Path(served.uri, "promoted", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    before = served.promoted()
    assert before is not None and served.history() == [before] and before.number == 1
    assert put(models.trained(200), served, models.data).promoted
    assert [pointer.number for pointer in served.history()] == [1, 2]


def test_a_promotion_under_the_number_of_another_is_named(served: Registry) -> None:
    """Believed, it would leave a number that is taken as the next one, for ever."""
    shutil.copy(Path(served.uri, "promoted", "00000001.json"), Path(served.uri, "promoted", "00000002.json"))
    with pytest.raises(UserError, match=r"promoted/00000002\.json: no promotion"):
        served.promoted()


def test_a_pointer_that_is_none_is_named(models: Models, served: Registry) -> None:
    Path(served.uri, "promoted", "00000002.json").write_text("{}")
    with pytest.raises(UserError, match=r"promoted/00000002\.json: no promotion"):
        served.promoted()


def test_a_key_that_is_missing_promotes_nothing(models: Models, tmp_path: Path) -> None:
    registry, config = Registry(str(tmp_path / "registry")), PromotionConfig(signing_key=str(tmp_path / "none.pem"))
    with pytest.raises(UserError, match=r"none\.pem: cannot be read"):
        put(models.trained(150), registry, models.data, config)
    assert registry.history() == []


def test_the_command_lists_and_fetches(models: Models, served: Registry, tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, [served.uri, "--fetch", str(tmp_path / "out" / "model")])
    assert ran.exit_code == 0, ran.output
    assert version_of(models.trained(150)) in ran.output and "it is the first in this registry" in ran.output
    check(tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "model"]
    again = CliRunner().invoke(main, [served.uri, "--fetch", str(tmp_path / "out" / "model")])
    assert again.exit_code == 1 and "is there already" in again.output
    empty = CliRunner().invoke(main, [str(tmp_path / "empty")])
    assert empty.exit_code == 1 and "no model was promoted yet" in empty.output


def test_a_bucket_that_is_missing_is_one_line(models: Models, store: FaultyS3) -> None:
    registry = Registry("s3://no-such-bucket/models")
    with pytest.raises(UserError, match="there is no bucket 'no-such-bucket'"):
        put(models.trained(150), registry, models.data)
